"""What docs/examples gives operators fits the verifier: names of metrics, labels and settings, paths, times."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloud.http_server import LAST_SECONDS
from cloud.scaling.options import Scale
from cloud.server.limits import MAX_CONNECTIONS
from cloud.settings import Settings
from cloud.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
#: labels that Prometheus and cloud.scale add
ADDED = {"instance", "job", "le", "replica"}


def known() -> dict[str, set[str]]:
    """Every sample that /metrics can have, with its labels."""
    samples: dict[str, set[str]] = {"up": set()}
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
    for found in re.finditer(r"\b(outrider:\w+|process_\w+|up)\b(?:\{([^}]*)\})?", expression):
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


def test_the_unit_waits_for_the_longest_end_and_restarts_no_wrong_setting() -> None:
    unit = dict(
        line.split("=", 1)
        for line in (EXAMPLES / "outrider-verifier.service").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    assert int(unit["TimeoutStopSec"]) > Settings().shutdown_timeout + LAST_SECONDS
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert find_spec(unit["ExecStart"].split(" -m ")[1].split()[0])
    assert int(unit["LimitNOFILE"]) > MAX_CONNECTIONS


def test_the_container_file_names_what_exists() -> None:
    text = (EXAMPLES / "Containerfile").read_text()
    for words in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / word).exists() for word in words.split()), words
    commands: list[list[str]] = [json.loads(found) for found in re.findall(r"CMD (\[.*\])", text)]
    assert [command[2] for command in commands] == ["cloud.healthcheck", "cloud.verifier"]
    assert all(find_spec(command[2]) for command in commands)
    for name in re.findall(r"VERIFIER_(\w+)=", text):
        assert name.lower() in Settings.model_fields


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
