"""The web page that drafts in a browser, and the bundle it drafts with, served at `/`.

Every file has its own route, so nothing else can be requested. The page may run its own scripts only, contacts only
verifiers, and is isolated from other pages, as WebAssembly's threads require.
"""

from __future__ import annotations

import json
import mimetypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from cloud.settings import Settings
from cloud.telemetry import log
from outrider_core.drafting.bundle import SERVER_HALF_FILE
from outrider_core.serving import PageRules, is_loopback

#: files that `make web` writes
BUILT = Path(__file__).parents[2] / "browser_runtime" / "dist" / "page"
#: files of its understudy that a browser reads
UNDERSTUDY_FILES = ("manifest.json", "target.onnx", "target.onnx.data")
#: allowed names of a bundle's files; other characters may have a meaning in a path or a route
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: `wss:` and this machine: the page's settings may name another verifier
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self'; worker-src 'self'; "
    "connect-src 'self' wss: ws://localhost:* ws://127.0.0.1:*; manifest-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm", ".svg": "image/svg+xml"} | {
    ".webmanifest": "application/manifest+json"
}


class PageError(RuntimeError):
    """The page or its bundle cannot be served. One line that says what to do."""


def find_page(settings: Settings) -> Path | None:
    """Return the folder that `settings` names, or on loopback the built one, if there is any.

    Raises PageError if the named folder does not exist.
    """
    folder = settings.page
    if folder is None:
        return BUILT if is_loopback(settings.host) and (BUILT / "index.html").is_file() else None
    if not (folder / "index.html").is_file():
        raise PageError(f"--page: {folder} holds no index.html; build the page with: make web")
    return folder


def page_routes(settings: Settings, pages: PageRules) -> list[Route]:
    """Return routes of the page that `find_page` finds, and of its bundle, under hosts that are not rebound.

    Raises PageError if the named folder does not exist.
    """
    folder = find_page(settings)
    if folder is None:
        return []
    files = {f"/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*") if path.is_file()}
    files = {name: path for name, path in files.items() if path.suffix != ".gz"}
    files["/"] = files.pop("/index.html")
    files |= {f"/bundle/{path.relative_to(settings.page_bundle)}": path for path in _bundle_files(settings)}
    log.info("web page served at /", folder=str(folder), bundle=str(settings.page_bundle))
    return [Route(name, _served(path, pages)) for name, path in files.items()]


def _bundle_files(settings: Settings) -> Iterator[Path]:
    """Yield the files that the page fetches of its bundle. Raises PageError."""
    folder, manifest = settings.page_bundle, settings.page_bundle / "manifest.json"
    if not manifest.is_file():
        if settings.page is None:
            return  # the page was not requested
        raise PageError(f"--page-bundle: {folder} holds no manifest.json; write a bundle with: outrider export bundle")
    try:
        raw: Any = json.loads(manifest.read_bytes())
        names = [name for name in raw["files"] if PLAIN_NAME.fullmatch(name) and name != SERVER_HALF_FILE]
        understudy = raw.get("understudy") and folder / raw["understudy"]["folder"]
    except (ValueError, KeyError, TypeError):
        problem = f"--page-bundle: {manifest} is broken; export the bundle again"
        if settings.page is None:
            log.warning("the web page has no bundle", why=problem)
            return
        raise PageError(problem) from None
    yield manifest
    yield from (folder / name for name in names)
    if understudy and PLAIN_NAME.fullmatch(understudy.name) and understudy.parent == folder:
        yield from (understudy / name for name in UNDERSTUDY_FILES)


def _served(path: Path, pages: PageRules) -> Callable[[Request], Any]:
    """Answer GET and HEAD of one file, compressed if there is a compressed copy beside it."""
    media_type = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    small = path.with_name(path.name + ".gz")

    async def served(request: Request) -> Response:
        if pages.rebound(request.headers):
            return PlainTextResponse("this name is not served; the operator can allow it with --allow-origin\n", 403)
        squeezed = small.is_file() and "gzip" in request.headers.get("accept-encoding", "")
        sent = small if squeezed else path
        try:
            stat = sent.stat()
        except FileNotFoundError:
            return PlainTextResponse("this file is gone; build the page or export the bundle again\n", 404)
        headers = HEADERS | ({"content-encoding": "gzip"} if squeezed else {})
        response = FileResponse(sent, headers=headers, media_type=media_type, stat_result=stat)
        if response.headers["etag"] in request.headers.get("if-none-match", ""):
            kept = {name: response.headers[name] for name in ("etag", "cache-control", "vary")}
            return Response(status_code=304, headers=kept | HEADERS)
        return response

    return served
