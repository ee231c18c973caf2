"""`cloud.scale` honours or refuses each of the verifier's settings before Ray starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from cloud.auth import main as make_token
from cloud.scale import _settings, main
from cloud.scaling.driver import _certificate, _check_tls
from cloud.scaling.fleet_metrics import FRESH_SECONDS, Hub, disagreement, merge
from cloud.scaling.options import ScaleError
from cloud.scaling.replica import build
from cloud.server.accounts import Accounts, AuthError
from cloud.settings import Settings
from cloud.telemetry.metrics import Metrics
from tests.cloud.drive import make_verifier, serve
from tests.tiny import tiny_model


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Holds tokens, chain.pem, key.pem and verifier.toml, which names them."""
    make_token([str(tmp_path / "tokens"), "app"])
    capsys.readouterr()
    issued = trustme.CA().issue_cert("localhost")
    (tmp_path / "chain.pem").write_bytes(issued.cert_chain_pems[0].bytes())
    (tmp_path / "key.pem").write_bytes(issued.private_key_pem.bytes())
    lines = [
        f'auth_file = "{tmp_path}/tokens"',
        f'ssl_certfile = "{tmp_path}/chain.pem"',
        f'ssl_keyfile = "{tmp_path}/key.pem"',
    ]
    (tmp_path / "verifier.toml").write_text("\n".join([*lines, "max_model_len = 96", 'host = "10.1.2.3"', "port = 1"]))
    return tmp_path


@pytest.mark.parametrize("by_flag", [True, False])
def test_the_config_file_is_honoured(files: Path, monkeypatch: pytest.MonkeyPatch, by_flag: bool) -> None:
    flags = ["--config", str(files / "verifier.toml")] if by_flag else []
    if not by_flag:
        monkeypatch.setenv("VERIFIER_CONFIG", str(files / "verifier.toml"))
    settings = _settings(flags, "0.0.0.0", 8765)  # would be refused without token file and certificate
    assert settings.auth_file == files / "tokens" and settings.max_model_len == 96
    assert (settings.host, settings.port) == ("0.0.0.0", 8765)
    assert _certificate(settings) == {"ssl_certfile": f"{files}/chain.pem", "ssl_keyfile": f"{files}/key.pem"}
    assert _certificate(Settings()) == {}


def test_paths_hold_in_other_folders(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    flags = ["--auth-file", "tokens", "--ssl-certfile", "chain.pem", "--ssl-keyfile", "key.pem"]
    settings = _settings(flags, "127.0.0.1", 8765)
    paths = (settings.auth_file, settings.ssl_certfile, settings.ssl_keyfile)
    assert all(path is not None and path.is_absolute() and path.is_file() for path in paths)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--proxy", "haproxy", "--", "--config", "{}/verifier.toml", "--insecure"], "haproxy speaks plain HTTP"),
        (["--", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--", "--auth-file", "/nowhere"], "/nowhere"),
        (["--", "--ssl-certfile", "{}/chain.pem", "--ssl-keyfile", "{}/tokens"], "--ssl-keyfile"),
        (["--", "--ssl-certfile", "{}/chain.pem", "--ssl-keyfile", "/nowhere"], "/nowhere"),
        (["--http-host", "0.0.0.0", "--", "--auth-file", "{}/tokens"], "--ssl-certfile"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    files: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert main([flag.format(files) for flag in flags]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and says in said[0], said


def test_a_proxy_without_tls_is_not_trusted_with_tokens(files: Path) -> None:
    """As where Serve ran already, with options of its own."""
    tls: dict[str, Any] = {"ssl_certfile": files / "chain.pem", "ssl_keyfile": files / "key.pem"}
    with serve(make_verifier(tiny_model(), ())) as address, pytest.raises(ScaleError, match="does not speak TLS"):
        _check_tls(Settings(port=int(address.split(":")[1]), **tls))
    context = {"ssl_certfile": str(files / "chain.pem"), "ssl_keyfile": str(files / "key.pem")}
    with serve(make_verifier(tiny_model(), ()), uvicorn_options=context) as address:
        _check_tls(Settings(port=int(address.split(":")[1]), **tls))


def test_build_honours_its_config_and_refuses_a_certificate(files: Path) -> None:
    with pytest.raises(ScaleError, match="http_options"):
        build({"config": str(files / "verifier.toml")})
    with pytest.raises(ScaleError, match="nowhere"):
        build({"config": "/nowhere.toml"})


def test_a_changed_token_file_is_noticed(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accounts = Accounts(files / "tokens")
    assert not accounts.stale
    make_token([str(files / "tokens"), "two"])
    token = capsys.readouterr().out.strip()
    assert accounts.authenticate(token) is None
    assert accounts.stale and accounts.reload() == (1, 0) and accounts.authenticate(token) is not None
    (files / "tokens").write_text("broken\n")
    assert accounts.stale
    with pytest.raises(AuthError):
        accounts.reload()
    assert not accounts.stale and accounts.authenticate(token) is not None
    os.remove(files / "tokens")
    assert accounts.stale
    with pytest.raises(AuthError):
        accounts.reload()


def test_reports_of_replicas_are_one() -> None:
    one, two = Metrics(), Metrics()
    one.errors.labels("5").inc()
    two.errors.labels("6").inc(2)
    two.step_seconds.observe(0.3)
    text = merge({"a": one.text(), "b": two.text()}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(families) == {family.name for family in text_string_to_metric_families(one.text().decode())}
    counted = {
        tuple(sorted(s.labels.items())): s.value for s in families["outrider:errors"].samples if "_total" in s.name
    }
    assert counted == {(("code", "5"), ("replica", "a")): 1.0, (("code", "6"), ("replica", "b")): 2.0}
    steps = families["outrider:step_seconds"].samples
    assert {s.labels["replica"]: s.value for s in steps if s.name.endswith("_count")} == {"a": 0.0, "b": 1.0}


def test_replicas_that_compute_differently_are_told_apart() -> None:
    alike, other, bare = Metrics(), Metrics(), Metrics()
    alike.serving(version="1", target="t", drafter="d", arithmetic="onnx-8-v6")
    other.serving(version="2", target="t", drafter="d", arithmetic="torch-float32")
    reports = {"a": alike.text(), "b": alike.text(), "c": bare.text()}
    assert disagreement(reports) == disagreement({}) == ""
    assert disagreement({**reports, "d": other.text()}) == (
        "target t, drafter d, arithmetic onnx-8-v6 on a and b; target t, drafter d, arithmetic torch-float32 on d"
    )
    other.serving(version="2", target="u", drafter="d", arithmetic="onnx-8-v6")
    assert "target u" in disagreement({**reports, "d": other.text()})


def test_a_replica_that_is_gone_is_left_out() -> None:
    now = [0.0]
    hub = Hub(lambda: now[0])
    hub.put("a", b"x")
    now[0] = FRESH_SECONDS
    hub.put("b", b"y")
    assert hub.all() == {"a": b"x", "b": b"y"}
    now[0] += 1
    assert hub.all() == {"b": b"y"}
