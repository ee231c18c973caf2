"""`outrider doctor`: check bundle, engine, address, verifier and clock, and say what to do."""

from __future__ import annotations

import asyncio
import socket
import ssl
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from msgspec import structs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edge_runtime.answer.offline_drafter import understudy_of
from edge_runtime.link.address import address_of, in_clear_text, proxy_of, verifier_url
from edge_runtime.link.events import LinkDown, LinkEvent, LinkRefused, LinkUp
from edge_runtime.link.tls import tls_context
from edge_runtime.link.websocket import Link
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.speed.arms import TreeArm
from edge_runtime.speed.controller import Controller
from outrider.cli.default_bundle import COPY_BYTES, REST_BYTES, find_default_bundle
from outrider.cli.opening import CommandError
from outrider.cli.terminal import printable
from outrider_core.drafting.bundle import Bundle, BundleError, open_bundle
from outrider_core.drafting.drafter import TreeShape
from outrider_core.models.drafter_arrays import read_drafter
from outrider_core.models.folders import default_drafter
from outrider_core.models.moa_config import DrafterError
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import PROTOCOL_VERSION, Hello
from outrider_core.targets.source import DEFAULT_TARGET, TargetError, TargetSource
from outrider_core.targets.understudy import Decoding, UnderstudyError

Level = Literal["good", "warning", "bad"]
#: most seconds of each check
LOOK_SECONDS = 8.0
#: difference of clocks, in seconds, above which certificates and tokens are at risk
CLOCK_SECONDS = 60.0
#: trees drafted and pings sent, of which the median counts
TRIES = 5
#: connections made to compare the arithmetic of replicas behind one address
DIALS = 4


@dataclass(frozen=True)
class Finding:
    """Result of one check. advice: what to do about it, "" if nothing is wrong."""

    name: str
    level: Level
    text: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class Pair(NamedTuple):
    """The hashes of target and drafter that a verifier must have. max_context: of the bundle, in tokens."""

    target_hash: str
    drafter_hash: str
    max_context: int

    @classmethod
    def default(cls) -> Pair | None:
        """Return the default target and drafter, or None if the target is not installed."""
        try:
            config, _, drafter_hash = read_drafter(default_drafter())
            return cls(TargetSource.resolve(DEFAULT_TARGET).identity, drafter_hash, config.max_context)
        except (DrafterError, TargetError, OSError):
            return None


def good(name: str, text: str, **figures: Any) -> Finding:
    return Finding(name, "good", text, "", figures)


def look_at_bundle(
    folder: Path,
    advice: str = "make one with `outrider export bundle --output-dir ...`, or copy the whole folder again",
) -> tuple[Finding, Bundle | None]:
    """Check the bundle. advice: what to do about one that does not open."""
    try:
        bundle = open_bundle(folder)
    except BundleError as error:
        return Finding("bundle", "bad", str(error), advice), None
    manifest = bundle.manifest
    size = sum(entry.bytes for entry in manifest.files.values())
    text = f"{folder}: {manifest.target}, {size / 1e6:.0f} MB, all hashes right"
    if manifest.understudy and (files := _files(folder / manifest.understudy.folder)):
        text += f", and an understudy of {sum(path.stat().st_size for path in files) / 1e6:.0f} MB"
    found = good(
        "bundle",
        text,
        target=manifest.target_hash,
        drafter=manifest.drafter_hash,
        bytes=size,
        engines={name: entry.quant for name, entry in manifest.engines.items()},
        versions=manifest.versions,
    )
    return found, bundle


def look_for_default_bundle() -> tuple[Finding, Bundle | None]:
    """Check the default bundle if it has been made; nothing is made here."""
    try:
        folder = find_default_bundle()
    except CommandError as error:
        return Finding("bundle", "bad", str(error), "or name a bundle with --bundle"), None
    if folder is None:
        advice = f"outrider chat makes it: {(COPY_BYTES + REST_BYTES) / 1e6:.0f} MB; or name one with --bundle"
        return Finding("bundle", "warning", "there is no default bundle yet", advice), None
    return look_at_bundle(folder, f"outrider models rm {folder.name}; the next outrider chat makes it again")


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def look_at_engine(bundle: Bundle, engine: str | None, threads: int) -> tuple[Finding, float]:
    """Check the engine; also return the seconds of one drafting step."""
    try:
        began = time.perf_counter()
        if not bundle.manifest.has_drafter:
            return look_at_understudy(bundle, threads)
        drafter = EdgeRuntime(bundle, None, RuntimeOptions(engine=engine, threads=threads)).drafter
        loaded = time.perf_counter() - began
    except BundleError as error:
        return Finding("engine", "bad", str(error), "install that package, or export for another engine"), 0.0
    prompt = bundle.render_chat([{"role": "user", "content": "Why is the sky blue?"}])
    trees, steps = [], []
    for token in range(TRIES):
        began = time.perf_counter()
        draft = drafter.draft([*prompt, token], Sampling(), TreeShape())
        trees.append(time.perf_counter() - began)
        steps.append(trees[-1] / max(1, draft.steps))
    step, tree = statistics.median(steps), statistics.median(trees)
    text = f"{type(drafter.engine).__name__}: loaded in {loaded:.1f} s, a tree in {1000 * tree:.0f} ms"
    found = good(
        "engine", text, load_seconds=round(loaded, 2), step_ms=round(1000 * step, 2), tree_ms=round(1000 * tree, 1)
    )
    if tree > 0.2:
        advice = "trees take longer than most round trips: use --threads, an int8 bundle, or --policy cloud-only"
        return Finding("engine", "warning", text, advice, found.figures), step
    return found, step


def look_at_understudy(bundle: Bundle, threads: int) -> tuple[Finding, float]:
    """Check the understudy that drafts in a bundle without a drafter; also return the seconds of a token."""
    understudy, prompt = understudy_of(bundle, threads), bundle.render_chat([{"role": "user", "content": "Hello"}])
    began = time.perf_counter()
    try:
        understudy.load()
    except UnderstudyError as error:
        return Finding("engine", "bad", str(error), "the bundle has no drafter, so nothing drafts without it"), 0.0
    loaded = time.perf_counter() - began
    understudy.draft(prompt, 1, Decoding(len(prompt)))  # reads the prompt
    began = time.perf_counter()
    tokens, _ = understudy.draft(prompt, 1 + TRIES, Decoding(len(prompt)))
    each = (time.perf_counter() - began) / max(1, len(tokens) - 1)
    text = f"no drafter: the understudy drafts, loaded in {loaded:.1f} s, a token in {1000 * each:.0f} ms"
    return good("engine", text, load_seconds=round(loaded, 2), token_ms=round(1000 * each, 2)), each


async def look_at_address(server: str, ca_file: Path | None) -> Finding:
    """Check name, port and certificate."""
    try:
        parts = address_of(server)
    except LinkRefused as error:
        return Finding("address", "bad", str(error), "use the address the verifier's operator gave you")
    host, secure = parts.hostname or "", parts.scheme == "wss"
    port = parts.port or (443 if secure else 80)
    if proxy := proxy_of(server):
        advice = "if the verifier is not reached: unset the proxy, or name the host in NO_PROXY"
        return Finding("address", "warning", f"{host}:{port} is reached through the proxy {proxy}", advice)
    began = time.perf_counter()
    try:
        context = tls_context(ca_file) if secure else None
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port, ssl=context), LOOK_SECONDS)
    except LinkRefused as error:
        return Finding("address", "bad", str(error), "give --ca-file a PEM file with the verifier's certificate")
    except socket.gaierror as error:
        return Finding("address", "bad", f"{host} has no address: {error.strerror}", "check the name and your DNS")
    except ssl.SSLCertVerificationError as error:
        return Finding(
            "address",
            "bad",
            f"the certificate of {host} is not trusted: {error.verify_message}",
            "give --ca-file, check this machine's clock, or sign in to the network you are on",
        )
    except ssl.SSLError as error:
        return Finding("address", "bad", f"{host}:{port} speaks no TLS: {error.reason}", "try ws:// instead of wss://")
    except TimeoutError:
        return Finding(
            "address",
            "bad",
            f"{host}:{port} does not answer within {LOOK_SECONDS:.0f} s",
            "a firewall may drop it: check the port, and whether you are on the right network",
        )
    except OSError as error:
        return Finding(
            "address",
            "bad",
            f"{host}:{port}: {error.strerror or error}",
            "start it: outrider verifier; or check host and port",
        )
    took = time.perf_counter() - began
    writer.close()
    kind = "TLS" if secure else "plain text"
    if in_clear_text(server):
        text = f"{host}:{port} connects, but anyone on the network path can read the conversation"
        return Finding("address", "warning", text, "ask the operator for a wss:// address")
    return good("address", f"{host}:{port} connects in {1000 * took:.0f} ms, {kind}", connect_ms=round(1000 * took, 1))


async def look_at_verifier(
    pair: Pair, server: str, token: str | None, ca_file: Path | None, step: float
) -> list[Finding]:
    """Check the handshake and round trips, and report which mode they favour."""
    events: asyncio.Queue[LinkEvent] = asyncio.Queue()
    hello = Hello(PROTOCOL_VERSION, pair.target_hash, pair.drafter_hash, "outrider-doctor")
    try:
        link = Link(server, hello, events.put_nowait, token, ca_file)
    except LinkRefused as error:
        return [Finding("verifier", "bad", str(error), "use the address the verifier's operator gave you")]
    task = asyncio.create_task(link.run())
    try:
        event = await asyncio.wait_for(events.get(), LOOK_SECONDS)
        if not isinstance(event, LinkUp):
            return [await _plain_text_to_tls(server) or _refusal(event)]
        rtts = [await link.ping() for _ in range(TRIES)]
        others = await _others(server, structs.replace(hello, arithmetic=event.welcome.arithmetic), token, ca_file)
    except (TimeoutError, OSError):
        silent = Finding(
            "verifier",
            "bad",
            "it accepts the connection and sends nothing",
            "something else listens there, or a proxy does not pass WebSockets on",
        )
        return [await _plain_text_to_tls(server) or silent]
    finally:
        task.cancel()
    welcome, rtt = event.welcome, statistics.median(rtts)
    controller = Controller(tree=TreeArm(step=step))
    controller.linked(welcome, rtt)
    computes = f", {welcome.arithmetic} arithmetic" if welcome.arithmetic else ""
    text = f"{welcome.server or 'a verifier'}: same target and drafter, context {welcome.max_context}{computes}"
    figures = {"server": welcome.server, "max_context": welcome.max_context, "budget": welcome.tree_budget}
    found = [good("verifier", text, **figures, arithmetic=welcome.arithmetic), _round_trips(rtts, controller)]
    if others:
        advice = "the operator should serve one target in one arithmetic there; an answer that moves waits for its own"
        found.append(Finding("replicas", "warning", f"verifiers that differ answer at this address: {others}", advice))
    if welcome.max_context < pair.max_context:
        text = f"the verifier holds {welcome.max_context} tokens, the bundle {pair.max_context}"
        found.append(Finding("context", "warning", text, "longer conversations end at the smaller one"))
    return found


async def _others(server: str, hello: Hello, token: str | None, ca_file: Path | None) -> str:
    """Dial a few more times, as an answer begun there would; return why a replica refused it, or ""."""
    for _ in range(DIALS):
        events: asyncio.Queue[LinkEvent] = asyncio.Queue()
        task = asyncio.create_task(Link(server, hello, events.put_nowait, token, ca_file).run())
        try:
            event = await asyncio.wait_for(events.get(), LOOK_SECONDS)
        except TimeoutError:
            return ""  # another check reports slowness
        finally:
            task.cancel()
        if isinstance(event, LinkDown) and event.refused:
            return event.reason
    return ""


async def _plain_text_to_tls(server: str) -> Finding | None:
    """Return a finding if `server` is addressed in plain text and its port uses TLS."""
    parts = urlsplit(verifier_url(server))
    if parts.scheme != "ws":
        return None
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent: identity does not matter
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, ssl=context)
    except (OSError, TimeoutError):
        return None
    writer.close()
    text = f"{parts.netloc} speaks TLS and was asked in plain text"
    return Finding("verifier", "bad", text, f"write the address with wss://, as in --server wss://{parts.netloc}")


def _refusal(event: LinkEvent) -> Finding:
    assert isinstance(event, LinkDown)
    text = event.reason
    if event.refused and "token" in text:
        advice = "give --token or set OUTRIDER_TOKEN; the operator makes one with python -m cloud.auth"
    elif event.refused:
        advice = "use a bundle made for this verifier's target and drafter (outrider export bundle)"
    else:
        advice = "no verifier answers there: check the path and the port, and sign in to the network you are on"
    return Finding("verifier", "bad", text, advice)


def _round_trips(rtts: list[float], controller: Controller) -> Finding:
    rtt, worst = statistics.median(rtts), max(rtts)
    figures: dict[str, Any] = {"rtt_ms": round(1000 * rtt, 1), "rtt_ms_worst": round(1000 * worst, 1)}
    text = f"{1000 * rtt:.0f} ms, {1000 * worst:.0f} at worst"
    stream = controller.stream.rate(controller.costs)
    if stream is not None:
        trees = controller.tree.rate(controller.costs)
        figures |= {"tree_tokens_per_second": round(trees, 1), "stream_tokens_per_second": round(stream, 1)}
        text += f"; at {controller.tree.tau:g} tokens a tree that is about {trees:.0f} tokens/s by trees"
        text += f", {stream:.0f} by streaming"
    return good("round trip", text, **figures)


async def look_at_clock(server: str, ca_file: Path | None) -> Finding:
    """Compare this machine's clock with the Date header of the verifier's."""
    parts = urlsplit(verifier_url(server))
    scheme = "https" if parts.scheme == "wss" else "http"

    def ask() -> tuple[str | None, float]:
        request = Request(f"{scheme}://{parts.netloc}/healthz", headers={"user-agent": "outrider-doctor"})
        context = tls_context(ca_file) if scheme == "https" else None
        with urlopen(request, timeout=LOOK_SECONDS, context=context) as answer:
            return answer.headers.get("date"), time.time()

    try:
        date, now = await asyncio.to_thread(ask)
        skew = now - parsedate_to_datetime(date or "").timestamp()
    except (OSError, ValueError, TypeError, LinkRefused):
        return Finding("clock", "warning", "the verifier's clock cannot be read", "nothing, if everything else is fine")
    if abs(skew) > CLOCK_SECONDS:
        text = f"this machine's clock is {skew:+.0f} s from the verifier's"
        advice = "set the clock: a wrong one makes certificates invalid"
        return Finding("clock", "warning", text, advice, {"skew_seconds": round(skew, 1)})
    return good("clock", f"within {max(1.0, abs(skew)):.0f} s of the verifier's", skew_seconds=round(skew, 1))


def look_at_versions() -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    names = ("outrider", "onnxruntime", "executorch", "tokenizers", "websockets", "numpy")
    versions = {name: of(name) for name in names}
    text = f"Python {sys.version.split()[0]}, protocol {PROTOCOL_VERSION}, " + ", ".join(
        f"{name} {number}" for name, number in versions.items() if number != "not installed"
    )
    return good("versions", text, **versions, protocol=PROTOCOL_VERSION)


async def examine(
    folder: Path | None,
    server: str | None,
    *,
    token: str | None = None,
    ca_file: Path | None = None,
    engine: str | None = None,
    threads: int = 0,
    tell: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Run every check that makes sense after those before it; call `tell` with each finding.

    folder: of a bundle; None: the default one, if it has been made.
    """
    findings: list[Finding] = []

    def found(*news: Finding) -> bool:
        for finding in news:
            findings.append(finding)
            tell(finding)
        return all(finding.level != "bad" for finding in news)

    found(look_at_versions())
    finding, bundle = look_at_bundle(folder) if folder else look_for_default_bundle()
    found(finding)
    step = 0.0
    if bundle:
        finding, step = await asyncio.to_thread(look_at_engine, bundle, engine, threads)
        found(finding)
    if server is None and folder is None:
        found(good("server", "no --server given: the full model runs in the same process"))
        return findings
    if server is None:
        found(Finding("server", "warning", "no --server given", "without one all text is offline and unverified"))
        return findings
    looks: list[Callable[[], Awaitable[Finding]]] = [
        lambda: look_at_address(server, ca_file),
        lambda: look_at_clock(server, ca_file),
    ]
    for look in looks:
        if not found(await look()):
            return findings
    made = bundle.manifest if bundle else None
    pair = Pair(made.target_hash, made.drafter_hash, made.max_context) if made else None if folder else Pair.default()
    if pair:
        found(*await look_at_verifier(pair, server, token, ca_file, step))
    return findings


def show(findings: list[Finding], console: Console) -> None:
    marks = {"good": "[green]ok[/]", "warning": "[yellow]look[/]", "bad": "[red]fails[/]"}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        table.add_row(marks[finding.level], finding.name, Text(printable(finding.text)))  # it may come from a verifier
        if finding.advice:
            style = "bold" if finding.level == "bad" else "dim"
            table.add_row("", "", Text(f"-> {printable(finding.advice)}"), style=style)
    console.print(table, highlight=False)
