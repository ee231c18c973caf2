"""Network links of real packets: the device and the verifier each in a network namespace, with a kernel's TCP and TLS.

Between them are two TUN interfaces, whose packets are delayed, lost, reordered and dropped here by a `Profile`, as
netem would; so no kernel module and, if user namespaces are allowed, no root is needed (Linux). Unlike an
`EmulatedLink`, handshakes take their round trips, losses have the effect of the kernel's TCP, and packets that are sent
in an outage are lost.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import hashlib
import os
import socket
import ssl
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.links import BUFFER, LabLink, Profile
from export.bundle.verifier_process import VerifierProcess

T = TypeVar("T")

#: largest packet in bytes, as in mobile networks
MTU = 1400
#: chance that later packets overtake a packet
OVERTAKEN = 0.002
#: environment variable of a process with its own network namespace
OWN_NETWORK = "OUTRIDER_OWN_NETWORK"
#: token of every device in this laboratory; useless elsewhere
TOKEN = "laboratory"
_TUN, _TUN_FLAGS, _SET_TUN = "/dev/net/tun", 0x1001, 0x400454CA  # IFF_TUN, IFF_NO_PI
_SET_ADDRESS, _SET_MASK, _SET_MTU, _GET_FLAGS, _SET_FLAGS = 0x8916, 0x891C, 0x8922, 0x8913, 0x8914
_UP, _NEW_NETWORK = 0x1, 0x40000000
_FIN, _SYN, _RST, _ACK = 1, 2, 4, 16


def enter_own_network(command: Sequence[str]) -> None:
    """Run `command` instead of this process, in a network namespace of its own, unless this one has it already.

    Raises OSError if the system does not support that.
    """
    if OWN_NETWORK not in os.environ:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        os.environ[OWN_NETWORK] = "1"
        os.execvp("unshare", ["unshare", *user, "--net", *command])


class Laboratory:
    """The verifier's side: a second network namespace, a certificate and a token. Used as a context manager.

    Raises OSError, on entering, if this process may not make one.
    """

    def __enter__(self) -> Laboratory:
        import trustme

        self._libc = ctypes.CDLL(None, use_errno=True)
        self._links = 0
        with socket.socket() as control:
            _set_up(control, "lo")
        self._far = _in_thread(self._leave)
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.ca_file, certificate, accounts = folder / "ca.pem", folder / "certificate.pem", folder / "accounts"
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca_file))
        names = ["127.0.0.1", *(_address(link, 2) for link in range(256))]
        authority.issue_cert(*names).private_key_and_cert_chain_pem.write_to_path(str(certificate))
        accounts.write_text(f"laboratory {hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
        #: flags of a verifier that these links reach
        self.flags = ("--host", "0.0.0.0", "--auth-file", str(accounts),
                      "--ssl-certfile", str(certificate), "--ssl-keyfile", str(certificate))  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()
        os.close(self._far)

    @property
    def trust(self) -> ssl.SSLContext:
        """Return the file that contains the verifier's certificate."""
        return ssl.create_default_context(cafile=self.ca_file)

    def there(self, call: Callable[[], T]) -> T:
        """Call a function in the verifier's network; a process that it starts stays there."""

        def run() -> T:
            self._check(self._libc.setns(self._far, _NEW_NETWORK))
            return call()

        return _in_thread(run)

    def next_link(self) -> int:
        """Return a number for the next link's addresses, 0..255."""
        self._links += 1
        return (self._links - 1) % 256

    def _leave(self) -> int:
        """Return the descriptor of a new network, which lives as long as this is open."""
        self._check(self._libc.unshare(_NEW_NETWORK))
        with socket.socket() as control:
            _set_up(control, "lo")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def _check(self, result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _in_thread(call: Callable[[], T]) -> T:
    """Call a function in a new thread: a namespace that a thread enters ends with it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _address(link: int, end: int) -> str:
    """Return the IPv4 address of a link's end: 1 is the device's, 2 the verifier's."""
    return f"10.77.{link}.{end}"


def _set_up(control: socket.socket, name: str) -> None:
    interface = name.encode()
    flags = struct.unpack("16sh", fcntl.ioctl(control, _GET_FLAGS, struct.pack("16sh22x", interface, 0))[:18])[1]
    fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh22x", interface, flags | _UP))


def open_tun(name: str, address: str) -> int:
    """Return the descriptor of a new interface of the calling thread's network: a read is one packet sent to it."""
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        interface = name.encode()
        fcntl.ioctl(descriptor, _SET_TUN, struct.pack("16sH22x", interface, _TUN_FLAGS))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for request, value in ((_SET_ADDRESS, address), (_SET_MASK, "255.255.255.0")):
                ipv4 = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(control, request, struct.pack("16s16s8x", interface, ipv4))
            fcntl.ioctl(control, _SET_MTU, struct.pack("16si20x", interface, MTU))
            _set_up(control, name)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class FarVerifier(VerifierProcess):
    """A verifier in the laboratory's network, with TLS and the laboratory's token."""

    def __init__(self, laboratory: Laboratory, drafter: Path, log: Path, *arguments: str, module: str) -> None:
        super().__init__(drafter, log, *laboratory.flags, *arguments, module=module, trust=laboratory.trust)
        self.laboratory = laboratory

    def start(self) -> None:
        self.laboratory.there(super().start)

    def is_ready(self) -> bool:
        return self.laboratory.there(super().is_ready)


class PacketLink(LabLink):
    """A link of this profile to `upstream_port` of the verifier's network; the device dials `address`, with TLS.

    cut: the network forgets every connection, like a restarted address translator: both ends are reset at once, and
    again whenever they send. In an outage, and while it is `silent`, packets are lost.
    """

    def __init__(
        self, laboratory: Laboratory, upstream_port: int, profile: Profile | None = None, seed: int = 0,
        delay: float = 0.0, dilation: float = 1,
    ) -> None:  # fmt: skip
        super().__init__(profile, seed, delay, dilation)
        self.laboratory, self.upstream_port = laboratory, upstream_port
        self._number = laboratory.next_link()
        self._ways: list[_Way] = []
        #: by the device's port: open connections, forgotten ones, and those whose packets get lost
        self._flows: dict[int, dict[bool, int]] = {}
        self._forgotten: set[int] = set()
        self._stranded: set[int] = set()

    async def __aenter__(self) -> PacketLink:
        name = f"lab{self._number}"
        near = open_tun(name, _address(self._number, 1))
        far = self.laboratory.there(lambda: open_tun(name, _address(self._number, 2)))
        loop = asyncio.get_running_loop()
        self._ways = [_Way(self, near, far, True), _Way(self, far, near, False)]
        for way in self._ways:
            loop.add_reader(way.source, way.read)
        return self

    async def __aexit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for way in self._ways:
            loop.remove_reader(way.source)
            way.closed = True
        for way in self._ways:
            os.close(way.source)

    @property
    def host(self) -> str:
        """The verifier's address."""
        return _address(self._number, 2)

    @property
    def address(self) -> str:
        return f"wss://{self.host}:{self.upstream_port}"

    def cut(self) -> None:
        self.cuts += bool(self._flows)
        for port, acknowledged in self._flows.items():
            for up, sequence in acknowledged.items():
                self.reset(port, up, sequence)
        self._forgotten.update(self._flows)
        self._flows.clear()

    def strand(self) -> None:
        self._stranded.update(self._flows)

    def passes(self, packet: bytes, up: bool) -> bool:
        """Return whether a packet gets through, and follow its connection. Only TCP does."""
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return False
        head = 4 * (packet[0] & 15)
        source, target, _, acknowledged = struct.unpack_from("!HHII", packet, head)
        flags, port = packet[head + 13], source if up else target
        if flags & _SYN and up:  # ports are reused
            self._forgotten.discard(port)
            self._stranded.discard(port)
        if self.silent or self.held or port in self._stranded:
            return False
        if port in self._forgotten:
            if not flags & _RST and flags & _ACK:
                self.reset(port, up, acknowledged)
            return False
        if flags & _RST:
            self._flows.pop(port, None)
        elif flags & _ACK or flags & _SYN:
            self._flows.setdefault(port, {})
            if flags & _ACK:
                self._flows[port][up] = acknowledged
        if flags & _FIN and not up:
            self._flows.pop(port, None)
        return True

    def reset(self, port: int, up: bool, sequence: int) -> None:
        """Reset the connection of the end whose packets go `up` (or not). sequence: the next one it expects."""
        device, verifier = socket.inet_aton(_address(self._number, 1)), socket.inet_aton(self.host)
        ports = (self.upstream_port, port) if up else (port, self.upstream_port)
        ends = verifier + device if up else device + verifier
        segment = bytearray(struct.pack("!HHIIBBHHH", *ports, sequence, 0, 5 << 4, _RST, 0, 0, 0))
        struct.pack_into("!H", segment, 16, _checksum(ends + struct.pack("!HH", socket.IPPROTO_TCP, 20) + segment))
        header = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0, 64, socket.IPPROTO_TCP, 0) + ends)
        struct.pack_into("!H", header, 10, _checksum(header))
        os.write(self._ways[0 if up else 1].source, header + segment)


def _checksum(data: bytes | bytearray) -> int:
    """Compute the checksum of RFC 1071, for an even number of bytes."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class _Way:
    """A direction. source, sink: descriptors of the interfaces at its ends."""

    def __init__(self, link: PacketLink, source: int, sink: int, up: bool) -> None:
        self.link, self.source, self.sink, self.up = link, source, sink, up
        self.closed = False
        self._free = self._arrival = 0.0

    def read(self) -> None:
        """Take every packet that waits at the source, and compute its arrival."""
        while True:
            try:
                packet = os.read(self.source, 1 << 16)
            except BlockingIOError:
                return
            self._send(packet)

    def _send(self, packet: bytes) -> None:
        link, loop = self.link, asyncio.get_running_loop()
        profile, rng, now = link.profile, link.rngs[self.up], loop.time()
        if not link.passes(packet, self.up) or rng.random() < profile.loss / 100:
            return
        seconds = link.dilation * 8 / (1e6 * (profile.up if self.up else profile.down))  # per byte
        if self._free > now + BUFFER * seconds:
            return  # the queue is full
        self._free = max(self._free, now) + len(packet) * seconds
        arrival = max(self._arrival, self._free + link.trip(self.up))
        if rng.random() < OVERTAKEN:
            loop.call_at(arrival + link.trip(self.up) / 2, self._arrive, packet)
            return
        self._arrival = arrival
        loop.call_at(arrival, self._arrive, packet)

    def _arrive(self, packet: bytes) -> None:
        if self.closed:
            return
        if self.up:
            self.link.up += len(packet)
        else:
            self.link.down += len(packet)
        os.write(self.sink, packet)


if __name__ == "__main__":  # python -m benchmarks.packets COMMAND ...: runs it in a network of its own
    enter_own_network(sys.argv[1:])
    os.execvp(sys.argv[1], sys.argv[1:])
