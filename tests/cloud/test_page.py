"""The web page: what is served, with which headers, to whom; and that nothing else is."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cloud.server.page import PageError, page_routes
from cloud.settings import Settings
from tests.cloud.drive import make_verifier, serve
from tests.tiny import tiny_model


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A page and a bundle."""
    page, bundle = tmp_path / "page", tmp_path / "bundle"
    (page / "ort").mkdir(parents=True)
    bundle.mkdir()
    (page / "index.html").write_text("<title>page</title>")
    (page / "app.js").write_text("export {}")
    (page / "app.js.gz").write_bytes(gzip.compress(b"export {}"))
    (page / "ort" / "engine.wasm").write_bytes(b"\0asm")
    (tmp_path / "secret").write_text("secret")
    (bundle / "secret").write_text("secret")
    (bundle / "tokenizer.json").write_text("{}")
    (bundle / "encoder.safetensors").write_bytes(b"rows")
    names = ("tokenizer.json", "encoder.safetensors", "../secret", "..", "{any:path}", "{any:kind}")
    (bundle / "understudy").mkdir()
    (bundle / "understudy" / "target.onnx").write_text("graph")
    (bundle / "understudy" / "tokenizer.json").write_text("{}")
    manifest = {"files": {name: {} for name in names}, "understudy": {"folder": "understudy"}}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    return page, bundle


@pytest.fixture
def address(folders: tuple[Path, Path]) -> Iterator[str]:
    page, bundle = folders
    with serve(make_verifier(tiny_model(), (), kv_tokens=2048), page=page, page_bundle=bundle) as address:
        yield f"http://{address}"


def test_the_page_and_its_bundle_are_served(address: str) -> None:
    index = httpx.get(f"{address}/")
    assert index.text == "<title>page</title>" and index.headers["content-type"].startswith("text/html")
    assert httpx.get(f"{address}/bundle/tokenizer.json").text == "{}"
    assert httpx.get(f"{address}/bundle/understudy/target.onnx").text == "graph"
    assert httpx.get(f"{address}/ort/engine.wasm").headers["content-type"] == "application/wasm"
    assert httpx.head(f"{address}/app.js").headers["content-type"].startswith("text/javascript")


def test_pages_are_isolated_and_run_only_their_own_scripts(address: str) -> None:
    headers = httpx.get(f"{address}/").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self' 'wasm-unsafe-eval'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cross-origin-embedder-policy"] == "require-corp"
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("folder", ["..", ".", "/etc", "a/b", 5, "{any:path}"])
def test_an_understudy_is_a_folder_of_the_bundle(folders: tuple[Path, Path], folder: object) -> None:
    page, bundle = folders
    (bundle / "manifest.json").write_text(json.dumps({"files": {}, "understudy": {"folder": folder}}))
    settings = Settings(page=page, page_bundle=bundle)
    if folder == 5:
        with pytest.raises(PageError, match="broken"):
            page_routes(settings, lambda _: False)
        return
    assert not any("target" in route.path for route in page_routes(settings, lambda _: False))


def test_nothing_else_is_served(address: str) -> None:
    for path in (
        "/secret",
        "/../secret",
        "/%2e%2e/secret",
        "/bundle/secret",
        "/bundle/../secret",
        "/bundle/x",
        "/bundle/understudy/tokenizer.json",
        "/bundle/understudy/target.onnx.data",  # which is not there yet
        "/app.js.gz",
    ):
        assert httpx.get(address + path).status_code == 404, path
    assert httpx.get(f"{address}/bundle/encoder.safetensors").status_code == 404
    assert httpx.post(f"{address}/").status_code == 405


def test_compressed_copies_and_known_files_are_not_sent_whole(address: str) -> None:
    small = httpx.get(f"{address}/app.js", headers={"Accept-Encoding": "gzip"})
    assert small.headers["content-encoding"] == "gzip" and small.text == "export {}"
    plain = httpx.get(f"{address}/app.js", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.text == "export {}"
    again = httpx.get(f"{address}/app.js", headers={"Accept-Encoding": "gzip", "If-None-Match": small.headers["etag"]})
    assert again.status_code == 304 and not again.content


def test_a_rebound_name_gets_no_page(address: str) -> None:
    for path in ("/", "/bundle/tokenizer.json"):
        assert httpx.get(address + path, headers={"Host": "evil.example"}).status_code == 403


def test_files_that_go_are_said_to_be_gone(address: str, folders: tuple[Path, Path]) -> None:
    (folders[0] / "ort" / "engine.wasm").unlink()
    assert httpx.get(f"{address}/ort/engine.wasm").status_code == 404


def test_what_is_named_has_to_be_there(folders: tuple[Path, Path], tmp_path: Path) -> None:
    page, bundle = folders
    verifier = make_verifier(tiny_model(), (), kv_tokens=2048)
    for wrong in ({"page": tmp_path}, {"page": page, "page_bundle": tmp_path}):
        with pytest.raises(PageError), serve(verifier, **wrong):
            pass
    (bundle / "manifest.json").write_text("[]")
    with pytest.raises(PageError, match="broken"), serve(verifier, page=page, page_bundle=bundle):
        pass


def test_a_page_that_nobody_asked_for_stops_no_verifier(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, bundle = folders
    monkeypatch.setattr("cloud.server.page.BUILT", page)
    (bundle / "manifest.json").write_text("{")
    with serve(make_verifier(tiny_model(), (), kv_tokens=2048), page_bundle=bundle) as address:
        assert httpx.get(f"http://{address}/").status_code == 200
        assert httpx.get(f"http://{address}/bundle/manifest.json").status_code == 404


def test_beyond_loopback_no_page_is_served_unasked() -> None:
    settings = Settings(host="0.0.0.0", insecure=True)
    verifier = make_verifier(tiny_model(), (), kv_tokens=2048)
    with serve(verifier, host=settings.host, insecure=True) as address:
        assert httpx.get(f"http://{address}/").status_code == 404
