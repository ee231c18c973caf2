"""docs/examples for operators match the verifier: names of metrics, labels and settings, paths, times."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cloud.http_server import LAST_SECONDS
from cloud.scaling.options import Scale
from cloud.server.limits import MAX_CONNECTIONS
from cloud.settings import Settings
from cloud.telemetry.metrics import Metrics
from tests.cloud.drive import make_verifier, serve
from tests.cloud.running import ENVIRONMENT, running, save_folder
from tests.tiny import tiny_model
from tests.waiting import HANG

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
#: labels that Prometheus and cloud.scale add
ADDED = {"instance", "job", "le", "replica"}
#: of NVIDIA's dcgm-exporter
FOREIGN = {"DCGM_FI_DEV_FB_USED": {"gpu"}}


def known() -> dict[str, set[str]]:
    """Every sample that /metrics can have, with its labels."""
    samples: dict[str, set[str]] = {"up": set(), **FOREIGN}
    registry = Metrics().registry
    for collector in list(registry._collector_to_names):
        labels = set(getattr(collector, "_labelnames", ()))
        for family in collector.describe() if hasattr(collector, "describe") else collector.collect():
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"]}
            for suffix in suffixes.get(family.type, [""]):
                samples[family.name + suffix] = labels
    for line in Metrics().text().decode().splitlines():
        if not line.startswith("#"):
            samples.setdefault(re.split(r"[ {]", line)[0], set())
    return samples


def expressions() -> Iterator[str]:
    for panel in json.loads((EXAMPLES / "grafana-dashboard.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for group in yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def used(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Metrics of a PromQL expression, each with the labels it selects by."""
    for found in re.finditer(r"\b(outrider:\w+|process_\w+|DCGM_\w+|up)\b(?:\{([^}]*)\})?", expression):
        yield found[1], set(re.findall(r"(\w+)\s*[=!]", found[2] or ""))


def test_dashboard_and_alerts_ask_for_metrics_that_exist() -> None:
    samples, seen = known(), set[str]()
    for expression in expressions():
        assert expression.count("(") == expression.count(")"), expression
        metrics = list(used(expression))
        assert metrics, expression
        for name, labels in metrics:
            assert name in samples, f"{name} in {expression}"
            assert labels <= samples[name] | ADDED, expression
            seen.add(name)
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", group)) <= ADDED.union(*(samples[name] for name, _ in metrics)), expression
    assert len(seen) > 25


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    assert board["title"] and board["uid"] and board["schemaVersion"] >= 36
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) and all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)


def test_every_alert_says_what_to_look_at() -> None:
    for group in yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"]:
        names = [rule["alert"] for rule in group["rules"]]
        assert len(set(names)) == len(names)
        for rule in group["rules"]:
            assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("page", "ticket")
    scrape = yaml.safe_load((EXAMPLES / "prometheus.yaml").read_text())
    assert [job["job_name"] for job in scrape["scrape_configs"]] == ["outrider"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_alerts() -> None:
    subprocess.run(["promtool", "check", "rules", EXAMPLES / "alerts.yaml"], check=True)


def test_the_operators_page_names_every_metric() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    for name in known():
        if name.startswith("outrider:"):
            short = re.sub(r"_(bucket|sum|count|total|created)$", "", name.removeprefix("outrider:"))
            assert re.search(rf"`{short}(_total)?(\{{\w+(, \w+)*\}})?`", page) or f"outrider:{short}" in page, name


def unit_lines() -> list[tuple[str, str]]:
    """Key and value of each line of the systemd unit."""
    lines = (EXAMPLES / "outrider-verifier.service").read_text().splitlines()
    return [(key, value) for key, found, value in (line.partition("=") for line in lines if line[:1] != "#") if found]


def test_the_unit_waits_for_the_longest_end_and_restarts_no_wrong_setting() -> None:
    unit = dict(unit_lines())
    assert int(unit["TimeoutStopSec"]) > Settings().shutdown_timeout + LAST_SECONDS
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert find_spec(unit["ExecStart"].split(" -m ")[1].split()[0])
    assert int(unit["LimitNOFILE"]) > MAX_CONNECTIONS
    names = {value.partition("=")[0] for key, value in unit_lines() if key == "Environment"}
    assert names == {"VERIFIER_CONFIG", "OUTRIDER_CACHE"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (EXAMPLES / "outrider-verifier.service").read_text()
    unit = tmp_path / "outrider-verifier.service"
    unit.write_text(text.replace("/opt/outrider/bin/python", sys.executable).replace("User=outrider", "User=root"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])


def test_systemd_learns_when_a_verifier_serves_and_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit's Type=notify."""
    assert ("Type", "notify") in unit_lines()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(HANG)
        monkeypatch.setitem(ENVIRONMENT, "NOTIFY_SOCKET", str(tmp_path / "notify"))
        with running(save_folder(tmp_path)) as server:
            assert systemd.recv(100) == b"READY=1"
            assert httpx.get(f"http://{server.address}/readyz").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert systemd.recv(100) == b"STOPPING=1"


def test_the_container_file_names_what_exists() -> None:
    text = (EXAMPLES / "Containerfile").read_text()
    for words in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / word).exists() for word in words.split()), words
    commands: list[list[str]] = [json.loads(found) for found in re.findall(r"CMD (\[.*\])", text)]
    assert [command[2] for command in commands] == ["cloud.healthcheck", "cloud.verifier"]
    assert all(find_spec(command[2]) for command in commands)
    for name in re.findall(r"VERIFIER_(\w+)=", text):
        assert name.lower() in Settings.model_fields
    assert re.findall(r"^EXPOSE (\d+)$", text, re.MULTILINE) == [str(Settings().port)]
    base = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    assert base and all(re.fullmatch(r"python:\d+\.\d+\.\d+-\S+", image) for image in base)
    assert "--editable" not in text and 'pip install --no-cache-dir ".[$EXTRAS]"' in text
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = ",".join(re.findall(r"EXTRAS=(\w+(?:,\w+)*)", text))
    assert set(named.split(",")) <= extras.keys()
    [(subcommand, flags)] = re.findall(r"python -m export (\w+) \S+ ((?:--\S+(?: \\\n)?\s*(?:/\S+)?\s*)+)", text)
    parser = subprocess.run([sys.executable, "-m", "export", subcommand, "--help"], cwd=ROOT, capture_output=True)
    folder = re.search(r"--output-dir (\S+)", flags)
    assert folder is not None and f"VERIFIER_MODEL={folder[1]}" in text
    for flag in re.findall(r"--[a-z-]+", flags):
        assert flag in parser.stdout.decode().split(), flag


def manifests() -> dict[str, dict[str, Any]]:
    """The documents of kubernetes.yaml by kind."""
    documents = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))
    assert len({document["kind"] for document in documents}) == len(documents)
    return {document["kind"]: document for document in documents}


def test_the_deployment_fits_the_verifier_and_its_image() -> None:
    kinds = manifests()
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    settings = Settings(**tomllib.loads(kinds["ConfigMap"]["data"]["verifier.toml"]))
    assert settings.model_fields_set == set(tomllib.loads(kinds["ConfigMap"]["data"]["verifier.toml"]))
    assert pod["terminationGracePeriodSeconds"] > settings.shutdown_timeout + LAST_SECONDS
    assert container["ports"] == [{"containerPort": settings.port, "name": "http"}]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts.values()) == volumes.keys() and not pod["enableServiceLinks"]
    assert settings.auth_file is not None
    assert "secret" in volumes[mounts[str(settings.auth_file.parent)]]
    image = (EXAMPLES / "Containerfile").read_text()
    config = re.findall(r"VERIFIER_CONFIG=(\S+)", image)[0]
    assert "configMap" in volumes[mounts[str(Path(config).parent)]] and Path(config).name in kinds["ConfigMap"]["data"]
    cache = re.findall(r"OUTRIDER_CACHE=(/var\S+)", image)[0]
    assert "emptyDir" in volumes[mounts[str(Path(cache).parent)]]  # the root is read-only
    assert f"USER {pod['securityContext']['runAsUser']}\n" in image
    with serve(make_verifier(tiny_model(), ())) as address:
        probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        for probe in [*probes, *kinds["PodMonitor"]["spec"]["podMetricsEndpoints"]]:
            assert probe["port"] == "http"
            assert httpx.get(f"http://{address}{probe['path']}").status_code == 200, probe


def test_what_stands_beside_the_deployment_selects_it() -> None:
    kinds = manifests()
    deployment = kinds["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    assert kinds["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    [port] = kinds["Service"]["spec"]["ports"]
    assert port["targetPort"] == "http" and kinds["NetworkPolicy"]["spec"]["ingress"][0]["ports"][0]["port"] == "http"
    target = kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    alerts = (EXAMPLES / "alerts.yaml").read_text()
    job = labels[kinds["PodMonitor"]["spec"]["jobLabel"]]
    assert set(re.findall(r'job="(\w+)"', alerts)) == {job}


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kuberay.yaml"])
def test_images_are_placeholders(name: str) -> None:
    images = re.findall(r"image: (\S+)", (EXAMPLES / name).read_text())
    assert images and all(image.startswith("registry.example/") for image in images)


def test_the_kuberay_manifest_holds_settings_that_exist() -> None:
    service: dict[str, Any] = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = serve["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == ("cloud.scale", "build")
    assert set(application["args"]) <= Scale.model_fields.keys() | Settings.model_fields.keys()
    Scale(**{key: value for key, value in application["args"].items() if key in Scale.model_fields})
    cluster = service["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], *(g["template"]["spec"] for g in cluster["workerGroupSpecs"])]
    for pod in pods:
        volumes = {volume["name"] for volume in pod["volumes"]}
        [container] = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes and not pod["enableServiceLinks"]
