"""Convert dex code back to classes for the desktop JVM, so that tests run R8's output."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from android_demo.ci.core import BuildError
from android_demo.ci.store import provided

#: Java 8, the first whose interfaces have bodies
CLASS_VERSION = 52
#: the classes have no stack maps, which Java requires of that version unless verification is off
JVM_OPTIONS = ("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote")
#: enjarify with two fixes: it reads const-wide/32 without its sign and writes an interface's methods as a class's
PROGRAM = """
from enjarify import dalvikformats, main, parsedex
from enjarify.jvm import constantpool

CONST_WIDE_32 = 0x17
INTERFACE = 0x200
interfaces = set()
read = dalvikformats.decode
parse = parsedex.DexFile.__init__
method = constantpool.ConstantPoolBase.method


def decode(shorts, at, opcode):
    after, values = read(shorts, at, opcode)
    if opcode == CONST_WIDE_32:
        values[-1] = dalvikformats.sign(values[-1], 32)
    return after, values


def parsed(dex, data):
    parse(dex, data)
    interfaces.update(one.name for one in dex.classes if one.access & INTERFACE)


def referred(pool, trip):
    return pool.imethod(trip) if trip[0] in interfaces else method(pool, trip)


dalvikformats.decode = decode
parsedex.DexFile.__init__ = parsed
constantpool.ConstantPoolBase.method = referred
main.main()
"""


def to_classes(dex: Path, jar: Path) -> Path:
    """Write the classes of a .dex or .apk file as `jar`. Raises FetchError or BuildError."""
    packages = provided("test-apk")["enjarify"] / "usr" / "lib" / "python3" / "dist-packages"
    done = subprocess.run(
        [sys.executable, "-O", "-c", PROGRAM, "--force", "--output", str(jar.absolute()), str(dex.absolute())],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=packages,
    )  # fmt: skip
    if done.returncode or ", 0 classes had errors" not in done.stdout:
        raise BuildError(done.stdout[-2000:])
    with zipfile.ZipFile(jar) as archive:
        classes = {name: bytearray(archive.read(name)) for name in archive.namelist()}
    with zipfile.ZipFile(jar, "w") as archive:
        for name, content in classes.items():
            struct.pack_into(">HH", content, 4, 0, CLASS_VERSION)
            archive.writestr(name, bytes(content))
    return jar
