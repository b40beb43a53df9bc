"""The files for systemd, Kubernetes, Prometheus and Grafana: each is what its tool takes, and true."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from coordinator.config import load
from coordinator.http.routes import TABLE as ROUTES
from coordinator.metrics import PREFIX, TABLE, Metric

CONFIGS: Final = Path(__file__).parents[2] / "configs"
_NAME: Final = re.compile(rf"\b{PREFIX}[a-z_]+")
_MATCHERS: Final = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")


def series() -> dict[str, Metric]:
    """Every name that the exposition has, with its metric."""
    names = {}
    for metric in TABLE:
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names.update({metric.full_name + end: metric for end in ends})
    return names


def expressions() -> list[tuple[str, str]]:
    """Every expression of the alerts and of the dashboard, with where it stands."""
    rules = yaml.safe_load((CONFIGS / "prometheus" / "alerts.yaml").read_text())
    found = [(f"alert {rule['alert']}", rule["expr"]) for group in rules["groups"] for rule in group["rules"]]
    dashboard = json.loads((CONFIGS / "grafana" / "kv-coordinator.json").read_text())
    for panel in dashboard["panels"]:
        found += [(f"panel {panel['title']}", target["expr"]) for target in panel["targets"]]
    return found


def mistakes(expression: str) -> list[str]:
    """What in an expression is not in the exposition."""
    known, wrong = series(), []
    used = _NAME.findall(expression)
    if not used:
        wrong.append("names no metric of ours")
    wrong += [f"there is no {name}" for name in used if name not in known]
    labels = {label for name in used if name in known for label in known[name].labels}
    labels |= {"instance", "le"}
    asked = [
        label for matchers in re.findall(r"\{([^}]*)\}", expression) for label in _MATCHERS.findall(matchers)
    ]
    asked += [by.strip() for many in re.findall(r"\bby \(([^)]*)\)", expression) for by in many.split(",")]
    wrong += [f"no label {label}" for label in asked if label not in labels]
    if expression.count("(") != expression.count(")") or expression.count("{") != expression.count("}"):
        wrong.append("brackets do not match")
    counters = [name for name in used if name in known and known[name].kind == "counter"]
    wrong += [
        f"{name} without rate" for name in counters if not re.search(r"\b(rate|increase)\(", expression)
    ]
    return wrong


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda value: str(value)[:40])
def test_every_expression_asks_for_what_is_told(where: str, expression: str) -> None:
    assert mistakes(expression) == [], where


def test_what_is_wrong_would_be_found() -> None:
    assert mistakes("kv_coordinator_nope > 1") == ["there is no kv_coordinator_nope"]
    assert mistakes('kv_coordinator_ready{reason="x"}') == ["no label reason"]
    assert mistakes("sum by (reason) (kv_coordinator_ready)") == ["no label reason"]
    assert mistakes("up == 0") == ["names no metric of ours"]
    assert mistakes("kv_coordinator_bugs_total > 1") == ["kv_coordinator_bugs_total without rate"]
    assert mistakes("rate(kv_coordinator_handoffs_opened[5m])") == [
        "there is no kv_coordinator_handoffs_opened"
    ]


def test_what_an_operator_must_hear_of_has_an_alert() -> None:
    told = " ".join(expression for where, expression in expressions() if where.startswith("alert "))
    for name in (
        "ready",
        "oldest_post_prefill_seconds",
        "quarantined_bytes",
        "log_lines_dropped_total",
        "bugs_total",
    ):
        assert f"{PREFIX}{name}" in told
    # One that is not there tells nothing of itself.
    assert re.search(rf"\bup == 0 and .*{PREFIX}ready", told)


def test_every_alert_says_what_it_is() -> None:
    rules = yaml.safe_load((CONFIGS / "prometheus" / "alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["labels"]["severity"] in {"page", "ticket"}
            assert rule["annotations"]["summary"]
            assert re.fullmatch(r"\d+m", rule.get("for", "1m"))


def test_the_alerts_are_what_prometheus_takes() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("there is no promtool here; the expressions are compared with the metrics all the same")
    rules = CONFIGS / "prometheus" / "alerts.yaml"
    done = subprocess.run([tool, "check", "rules", rules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_panels_lie_side_by_side() -> None:
    dashboard = json.loads((CONFIGS / "grafana" / "kv-coordinator.json").read_text())
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) > 10
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells
        assert max(x for x, _ in cells) < 24


def test_the_unit_is_what_systemd_takes(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("there is no systemd-analyze here")
    text = (CONFIGS / "systemd" / "kv-coordinator.service").read_text()
    installed = re.search(r"^ExecStart=(\S+)", text, re.MULTILINE)
    assert installed is not None
    unit = tmp_path / "kv-coordinator.service"
    unit.write_text(text.replace(installed[1], str(Path(sys.executable).resolve())))
    done = subprocess.run([tool, "verify", unit], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "kv-coordinator" in line]
    assert complaints == []


def test_the_unit_gives_the_coordinator_time_to_end_and_a_watchdog() -> None:
    text = (CONFIGS / "systemd" / "kv-coordinator.service").read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    assert settings["Type"] == "notify"
    config = load(CONFIGS / "local.toml")
    release = config.release
    slowest_s = config.shutdown.grace_s + 2 * release.settle_s + release.drain_s
    assert float(settings["TimeoutStopSec"]) > slowest_s
    assert float(settings["WatchdogSec"]) > 1
    assert settings["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_the_unit_leaves_the_coordinator_where_it_writes() -> None:
    """``ProtectSystem=strict`` makes all read-only, /tmp too, but for the directories that systemd makes."""
    text = (CONFIGS / "systemd" / "kv-coordinator.service").read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    assert settings["ProtectSystem"] == "strict"
    runtime = f"/run/{settings['RuntimeDirectory']}"
    # ``coordinator.private`` makes a directory for the workers' socket.
    assert settings["Environment"] == f"TMPDIR={runtime}"
    listen = load(CONFIGS / "local.toml").listen
    assert {address.rpartition("/")[0] for address in (*listen.control, *listen.outcomes)} == {
        f"ipc://{runtime}"
    }
    (file,) = re.findall(r'^# file = "(.+)"$', (CONFIGS / "local.toml").read_text(), re.MULTILINE)
    assert str(Path(file).parent) == f"/var/log/{settings['LogsDirectory']}"
    assert file in text


def test_the_unit_never_gives_up() -> None:
    text = (CONFIGS / "systemd" / "kv-coordinator.service").read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    assert settings["Restart"] == "always"
    assert settings["StartLimitIntervalSec"] == "0"


@pytest.fixture
def manifest() -> list[dict[str, Any]]:
    """The objects of the manifest."""
    return list(yaml.safe_load_all((CONFIGS / "kubernetes" / "prefill-pod.yaml").read_text()))


def test_the_manifest_is_what_kubectl_takes(tmp_path: Path) -> None:
    tool = shutil.which("kubectl")
    if tool is None:
        pytest.skip("there is no kubectl here; the manifest is looked at all the same")
    file = CONFIGS / "kubernetes" / "prefill-pod.yaml"
    # Without a cluster: it reads the objects, and writes them out again.
    done = subprocess.run(
        [tool, "annotate", "--local", "-f", file, "checked=yes", "-o", "name"],
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["configmap/kv-coordinator", "pod/prefill-0"]


def test_the_pod_shares_what_engine_and_coordinator_must_share(manifest: list[dict[str, Any]]) -> None:
    pod = manifest[1]["spec"]
    (sidecar,) = pod["initContainers"]
    (engine,) = pod["containers"]
    assert sidecar["restartPolicy"] == "Always"
    assert pod["shareProcessNamespace"] is True
    mounts = [{m["name"]: m["mountPath"] for m in c["volumeMounts"]} for c in (sidecar, engine)]
    for name, path in (("shm", "/dev/shm"), ("run", "/run/kv-coordinator")):  # noqa: S108 - nothing is written
        assert mounts[0][name] == mounts[1][name] == path
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts[0]) | set(mounts[1]) == set(volumes)
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert volumes["token"]["secret"]["defaultMode"] == 0o440


def test_the_probes_ask_for_what_is_there(manifest: list[dict[str, Any]]) -> None:
    sidecar = manifest[1]["spec"]["initContainers"][0]
    paths = {route.path for route in ROUTES}
    ports = {port["name"] for port in sidecar["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = sidecar[probe]["httpGet"]
        assert asked["path"] in paths
        assert asked["port"] in ports
    assert sidecar["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert sidecar["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert manifest[1]["metadata"]["annotations"]["prometheus.io/path"] in paths


def test_the_pods_configuration_can_be_used_and_leaves_time_to_end(
    manifest: list[dict[str, Any]], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 32)
    token.chmod(0o440)
    file = tmp_path / "coordinator.toml"
    text = manifest[0]["data"]["coordinator.toml"]
    file.write_text(text.replace("/etc/kv-coordinator-token/token", str(token)))
    config = load(file)
    port = manifest[1]["spec"]["initContainers"][0]["ports"][0]["containerPort"]
    assert config.http.address == f"0.0.0.0:{port}"
    grace_s = manifest[1]["spec"]["terminationGracePeriodSeconds"]
    slowest_s = config.shutdown.grace_s + 2 * config.release.settle_s + config.release.drain_s
    assert grace_s > slowest_s
