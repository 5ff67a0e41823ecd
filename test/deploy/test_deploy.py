"""The files of `deploy/`, as far as they can be tested without the programs that read them; with
promtool, docker-compose and kubectl where they are installed."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_hc.command_line import add_flags, given_flags
from sglang_hc.metrics import COUNTS, FAMILIES, HISTOGRAMS, LEVELS
from support.dashboards import ALERTS, DEPLOY, ON_FAILURE, missing, named, panels, queries, rules
from support.waiting import HANGS_S

ROOT = DEPLOY.parent


def load(path: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


def test_each_of_our_metrics_that_is_asked_for_exists() -> None:
    known = {f"sglang_hc_{name}" for name in LEVELS}
    known |= {f"sglang_hc_{name}_total" for name in (*COUNTS, *FAMILIES)} | ON_FAILURE
    known |= {f"sglang_hc_{name}_bucket" for name in HISTOGRAMS}
    asked = named([*queries(), *(rule["expr"] for rule in rules())])
    assert asked <= known, "SGLang's have a `:` or a `_`, as Prometheus asks for them"
    assert len(asked) > 50


def test_a_metric_that_is_not_there_is_found_missing() -> None:
    page = "sglang_hc_host_slots 4\nsglang_hc_restore_reason_x_total 3\n"
    found = missing(page)
    assert "sglang_hc_host_slots" not in found and "sglang_hc_host_blocks" in found
    assert not any("restore_reason" in name for name in found)
    assert any("restore_reason" in name for name in missing("a 1\n"))


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in found)
    for one, other in combinations((panel["gridPos"] for panel in found), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


@pytest.mark.parametrize("query", [*queries(), *(rule["expr"] for rule in rules())])
def test_brackets_of_a_query_close(query: str) -> None:
    opened = []
    for letter in re.sub(r'"[^"]*"', "", query):
        if letter in "([{":
            opened.append(letter)
        elif letter in ")]}":
            assert opened and opened.pop() + letter in ("()", "[]", "{}")
    assert not opened


def test_each_alert_says_what_it_means_and_how_urgent_it_is() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


def test_each_alert_is_raised_in_a_test() -> None:
    """That it is, says promtool."""
    (found,) = load("prometheus/alerts_test.yaml")
    raised = {
        case["alertname"]
        for test in found["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert raised == {rule["alert"] for rule in rules()}


def test_prometheus_reads_the_rules_and_scrapes_the_server() -> None:
    (config,) = load("prometheus/prometheus.yaml")
    assert config["rule_files"] == [ALERTS.name]
    (compose,) = load("compose.yaml")
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in compose["services"] and compose["services"][host]["ports"][0].endswith(port)
    assert f'job="{job["job_name"]}"' in ALERTS.read_text()


def options(words: list[str]) -> dict[str, Any]:
    """Ours among the flags of a server, `${NAME:-64}` and `${NAME:?why}` filled in. Not
    checked: the machine is another one."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    filled = [re.sub(r"\$\{\w+:[-?]([^}]*)\}", r"\1", word) for word in words]
    known, others = parser.parse_known_args(filled)
    assert not [word for word in others if word.startswith("--hc")]
    return given_flags(known)


def test_compose_mounts_what_is_there_and_gives_flags_that_exist() -> None:
    (compose,) = load("compose.yaml")
    services = compose["services"]
    server = services["server"]
    assert (DEPLOY / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).is_file()
    for service in services.values():
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).is_dir()
    config = options(server["command"])
    assert list(config["disk"]) == ["/blocks:400"] and float(config["host_size_gb"]) == 64
    inside = {volume.split(":")[-1] for volume in server["volumes"]}
    assert {"/blocks", "/var/cache/sglang-hc"} <= inside
    (dashboards,) = load("grafana/provisioning/dashboards/sglang-hc.yaml")
    folder = dashboards["providers"][0]["options"]["path"]
    assert any(volume.split(":")[1] == folder for volume in services["grafana"]["volumes"])
    (sources,) = load("grafana/provisioning/datasources/prometheus.yaml")
    assert sources["datasources"][0]["url"].split("/")[-1].split(":")[0] in services


def test_the_image_copies_what_is_there_and_has_the_pinned_sglang() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for line in re.findall(r"^COPY (.*)$", text, re.M):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources)
    (pinned,) = re.findall(r'"sglang==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    named = re.findall(r"sglang:v([\d.]+)", text) + re.findall(r"v == '([\d.]+)'", text)
    assert named == [pinned, pinned] and f"and {pinned} is needed" in text


def test_the_replicas_share_one_directory_and_mount_what_they_name() -> None:
    service, claim, replicas = load("kubernetes/replicas.yaml")
    spec = replicas["spec"]["template"]["spec"]
    labels = replicas["spec"]["template"]["metadata"]["labels"]
    assert replicas["spec"]["replicas"] == 2
    assert replicas["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for container in (*spec["initContainers"], *spec["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
    shared = volumes["blocks"]["persistentVolumeClaim"]["claimName"]
    assert shared == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (server,) = spec["containers"]
    config = options(server["args"])
    at = {mount["mountPath"] for mount in server["volumeMounts"]}
    assert config["remote"] == "file" and '"/shared:1800"' in config["remote_config"]
    assert "/shared" in at and str(Path(config["remote_key"]).parent) in at
    assert config["forms"] == "kv", "auto may differ between machines"
    (kustomization,) = load("kubernetes/kustomization.yaml")
    secrets = {one["name"] for one in kustomization["secretGenerator"]}
    assert volumes["secret"]["secret"]["secretName"] in secrets


def test_the_servers_of_several_machines_agree_on_one_mooncake() -> None:
    """That these commands work is in stores/test_mooncake_deploy.py."""
    (compose,) = load("mooncake.yaml")
    services = compose["services"]
    for service in services.values():
        assert service["image"] == "sglang-hc:mooncake"
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        (argument,) = service["build"]["args"]
        assert f"\nARG {argument}=\n" in (DEPLOY / "Containerfile").read_text()
    config = options(services["server"]["command"])
    assert config["remote"] == "mooncake" and config["forms"] == "kv"
    folders = {volume.split(":")[-2] for volume in services["server"]["volumes"]}
    assert str(Path(config["remote_key"]).parent) in folders


def run(*words: str, cwd: Path, **env: str) -> str:
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    done = subprocess.run(
        words, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=HANGS_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", "prometheus.yaml"),
        ("check", "rules", "alerts.yaml"),
        ("test", "rules", "alerts_test.yaml"),
    ],
    ids=" ".join,
)
def test_promtool_takes_the_rules(words: tuple[str, ...]) -> None:
    assert "SUCCESS" in run("promtool", *words, cwd=ALERTS.parent)


@pytest.mark.parametrize("file", ["compose.yaml", "mooncake.yaml"])
def test_compose_takes_the_files(file: str) -> None:
    """And finds each variable that must be given named at the top."""
    head = (DEPLOY / file).read_text().partition("services:")[0]
    given = dict.fromkeys(re.findall(r"\b([A-Z]+)=", head), "/given")
    given |= {"KEYS": "/keys"} if "key" in head else {}
    shown = run("docker-compose", "-f", file, "config", cwd=DEPLOY, **given)
    assert yaml.safe_load(shown)["services"].keys() == load(file)[0]["services"].keys()


def test_kustomize_takes_the_example(tmp_path: Path) -> None:
    folder = shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    (folder / "blocks.key").write_bytes(bytes(32))
    made = list(yaml.safe_load_all(run("kubectl", "kustomize", str(folder), cwd=folder)))
    assert {one["kind"] for one in made} >= {"Secret", "Service", "StatefulSet"}
