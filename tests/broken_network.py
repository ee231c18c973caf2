"""Run a command in a network where the verifier's first address swallows all packets, as a broken IPv6 does.

python -m tests.broken_network COMMAND...

An argument {} of the command becomes the address of a verifier that greets who dials.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile

from websockets.asyncio.server import ServerConnection, serve

from outrider_core.protocol.wire import PROTOCOL_VERSION, SUBPROTOCOL, Welcome, encode

ISOLATED = ("unshare", "--map-root-user", "--mount", "--net")
HOSTS = "2001:db8::2 verifier.test\n127.0.0.1 verifier.test localhost\n"
#: behind a device that nobody reads, all of 2001:db8::/64 is silent
SETUP = """
ip link set lo up
ip tuntap add swallow mode tun
ip link set swallow up
ip address add 2001:db8::1/64 dev swallow nodad
ip address add 192.0.2.1/24 dev swallow
mount --bind "$1" /etc/hosts
"""


def available() -> bool:
    """Return whether such a network can be made here."""
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "ip"))):
        return False
    return subprocess.run([sys.executable, "-m", __name__, "true"], capture_output=True).returncode == 0


def command_in_it(*command: str) -> list[str]:
    """Return the command line that runs `command` there."""
    return [sys.executable, "-m", __name__, *command]


async def _greet(connection: ServerConnection) -> None:
    await connection.recv()
    await connection.send(encode(Welcome(PROTOCOL_VERSION, "target", "drafter", 100, 64, 8, 8)))
    await connection.wait_closed()


async def _run(command: list[str]) -> int:
    async with serve(_greet, "127.0.0.1", 0, subprotocols=[SUBPROTOCOL]) as server:  # type: ignore[list-item]
        address = f"ws://verifier.test:{server.sockets[0].getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(*(address if word == "{}" else word for word in command))
        return await process.wait()


def main(command: list[str]) -> int:
    if command[0] != "--inside":
        os.execvp(ISOLATED[0], [*ISOLATED, sys.executable, "-m", "tests.broken_network", "--inside", *command])
    with tempfile.NamedTemporaryFile("w") as hosts:
        hosts.write(HOSTS)
        hosts.flush()
        subprocess.run(["bash", "-euc", SETUP, "setup", hosts.name], check=True)
    return asyncio.run(_run(command[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
