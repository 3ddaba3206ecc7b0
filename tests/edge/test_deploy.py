"""The deployment files, as far as they can be checked without the machines they are for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from prometheus_client.parser import text_string_to_metric_families

from hawkvision.core import __version__
from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
from hawkvision.core.settings.load import load_config
from hawkvision.datacenter.launch.supervisor import DRAIN_S, STOP_S
from hawkvision.datacenter.servers.metrics import DatacenterMetrics
from hawkvision.system.child_server import ServerProcess, running
from tests.authority import Authority
from tests.edge.deploy_files import DEPLOY, KEY, ROOT, instructions, pod

SETTINGS = {f"HAWKVISION_EDGE_{f.name.upper()}" for f in msgspec.structs.fields(EdgeConfig)} | {
    f"HAWKVISION_DC_{f.name.upper()}" for f in msgspec.structs.fields(DatacenterConfig)
}
FILES = sorted(path for path in [*DEPLOY.iterdir(), *(ROOT / "docs" / "operations").glob("*.md")] if path.is_file())


def last_stage() -> dict[str, str]:
    """The final stage's instructions, the last of each kind."""
    found = instructions()
    start = max(i for i, (name, _) in enumerate(found) if name == "FROM")
    return dict(found[start:])


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    return document


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, text
    return float(match[1])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_setting_that_is_named_exists(path: Path) -> None:
    named = set(re.findall(r"HAWKVISION_(?:EDGE|DC)_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8")))
    assert named <= SETTINGS


# -------------------------------------------------------------------------------------------------- settings


def test_example_settings_load() -> None:
    config = load_config(EdgeConfig, DEPLOY / "edge.toml", environ={})
    assert config.host == "127.0.0.1"


def test_example_settings_are_refused_beyond_loopback_without_a_key() -> None:
    with pytest.raises(ConfigError, match="HAWKVISION_EDGE_API_KEY"):
        load_config(EdgeConfig, DEPLOY / "edge.toml", {"host": "0.0.0.0"}, environ={})


def test_commented_settings_load_too(tmp_path: Path) -> None:
    text = (DEPLOY / "edge.toml").read_text(encoding="utf-8")
    (tmp_path / "edge.toml").write_text(re.sub(r"(?m)^#(\w+ = )", r"\1", text), encoding="utf-8")
    assert load_config(EdgeConfig, tmp_path / "edge.toml", environ={}).datacenter_url is not None


def test_key_left_empty_in_a_template_does_not_open_the_server() -> None:
    environ = {"HAWKVISION_EDGE_API_KEY": "", "HAWKVISION_EDGE_HOST": "0.0.0.0"}
    with pytest.raises(ConfigError, match="api_key"):
        load_config(EdgeConfig, environ=environ)


def test_no_secret_is_written_down() -> None:
    for line in (DEPLOY / "env.example").read_text(encoding="utf-8").splitlines():
        assert line.startswith("#") or line.endswith("="), line


# ------------------------------------------------------------------------------------------------- container


def test_installed_extras_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = compose()["services"]["datacenter"]["build"]["args"]["EXTRAS"].split(",")
    defaults = [rest.removeprefix("EXTRAS=") for name, rest in instructions() if rest.startswith("EXTRAS=")]
    for extra in (*extras, *defaults):
        assert re.search(rf"(?m)^{extra} = \[", project), extra


LOCKED = re.compile(
    r"(?m)^([a-zA-Z0-9_.-]+)(?:\[[^\]]*\])?==(\S+)(?: ; .*?)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
)


def locked(name: str) -> dict[str, str]:
    """The version of each package in a lock; every one of them has hashes."""
    text = (DEPLOY / f"requirements.{name}.txt").read_text(encoding="utf-8")
    found: dict[str, str] = {canonicalize_name(package): version for package, version, _ in LOCKED.findall(text)}
    assert len(LOCKED.findall(text)) == len(re.findall(r"(?m)^\S.*==", text)), "a package without hashes"
    return found


@pytest.mark.parametrize("extras", ["build", "build,datacenter"])
def test_the_container_installs_from_a_lock_that_keeps_to_the_projects_bounds(extras: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in extras.split(","):
        wanted += project["optional-dependencies"][extra]
    versions = locked(extras)
    for each in map(Requirement, wanted):
        version = versions[canonicalize_name(each.name)]
        assert each.specifier.contains(version), f"{each}: the lock has {version}; run `make lock`"


def test_nothing_is_installed_into_the_image_but_from_locks() -> None:
    assert "hatchling" in locked("wheel")
    installs = [
        each for name, rest in instructions() if name == "RUN" for each in rest.split("&&") if "pip install" in each
    ]
    assert installs
    for each in installs:
        assert "--require-hashes" in each or "--no-deps --no-index" in each, each


def test_a_release_names_the_base_image_and_must_name_its_digest() -> None:
    froms = [rest.split()[0] for name, rest in instructions() if name == "FROM"]
    assert froms == ["${BASE}", "${BASE}"]
    for base in ("", "python:3.11-slim-bookworm"):
        made = subprocess.run(["make", "-s", "image", f"BASE={base}"], cwd=ROOT, capture_output=True, text=True)
        assert made.returncode != 0
        assert "expected BASE=python:3.11-slim-bookworm@sha256:DIGEST" in made.stderr


def test_image_runs_as_nobody_in_particular_and_stops_on_sigterm() -> None:
    stage = last_stage()
    assert stage["USER"] == "10001:10001"
    assert stage["STOPSIGNAL"] == "SIGTERM"
    assert stage["EXPOSE"] == "8080"
    assert "HAWKVISION_EDGE_API_KEY" not in stage["ENV"]


def test_health_check_passes_on_a_live_node_and_fails_on_a_dead_one(edge: Any) -> None:
    _, _, command = last_stage()["HEALTHCHECK"].partition(" CMD ")
    words = msgspec.json.decode(command, type=list[str])

    def check(port: int) -> int:
        env = {"HAWKVISION_EDGE_PORT": str(port)}
        return subprocess.run([sys.executable, *words[1:]], env=env, capture_output=True).returncode

    assert check(edge.port) == 0
    assert check(1) != 0


def test_health_check_passes_on_a_node_that_speaks_tls(tmp_path: Path) -> None:
    _, _, command = last_stage()["HEALTHCHECK"].partition(" CMD ")
    words = msgspec.json.decode(command, type=list[str])
    pair = Authority(tmp_path).certify("node", "node.example")
    files = {"HAWKVISION_EDGE_TLS_CERTIFICATE": str(pair.certificate), "HAWKVISION_EDGE_TLS_KEY": str(pair.key)}
    with running("edge", "--port", "0", "--backend", "noop", env=files) as node:
        env = {"HAWKVISION_EDGE_PORT": str(node.port), **files}
        asked = subprocess.run([sys.executable, *words[1:]], env=env, capture_output=True, text=True)
    assert (asked.returncode, asked.stderr) == (0, "")


# --------------------------------------------------------------------------------------------------- compose


def test_compose_services_restart_drain_and_hold_no_privileges() -> None:
    services = compose()["services"]
    assert set(services) == {"models", "edge", "datacenter"}
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert "models:/var/lib/hawkvision" in service["volumes"][0]
    for name in ("edge", "datacenter"):
        assert services[name]["restart"] == "unless-stopped"
        assert "stop_grace_period" in services[name]
    assert "models" in compose()["volumes"]


def test_compose_builds_what_it_runs_from_this_dockerfile() -> None:
    built = {name: service["build"] for name, service in compose()["services"].items() if "build" in service}
    assert set(built) == {"models", "datacenter"}
    for build in built.values():
        context = (DEPLOY / build["context"]).resolve()
        assert (context / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"


def test_compose_settings_load_once_the_keys_are_filled_in() -> None:
    services = compose()["services"]

    def filled(name: str) -> dict[str, str]:
        return {k: re.sub(r"\$\{\w+:\?.*\}", KEY, str(v)) for k, v in services[name]["environment"].items()}

    edge = load_config(EdgeConfig, environ={"HAWKVISION_EDGE_HOST": "0.0.0.0"} | filled("edge"))
    tier = load_config(DatacenterConfig, environ=filled("datacenter"))
    assert edge.datacenter_url == f"http://datacenter:{tier.port}"
    assert edge.datacenter_api_key == tier.api_key
    assert edge.drain_timeout_s < seconds(services["edge"]["stop_grace_period"])


def test_compose_refuses_to_start_without_keys() -> None:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    keys = re.findall(r"_API_KEY: (.*)", text)
    assert len(keys) == 3
    assert all(re.fullmatch(r"\$\{\w+:\?.+\}", key) for key in keys)


@pytest.mark.parametrize("name", ["models", "edge", "datacenter"])
def test_container_commands_are_understood(name: str) -> None:
    """Each command's own parser takes its words; `--help` ends it before it does anything."""
    words = compose()["services"][name].get("command") or msgspec.json.decode(last_stage()["CMD"], type=list[str])
    program, *rest = words
    command = ["-m", "hawkvision.cli"] if program == "hawkvision" else []
    entry = [sys.executable, "-c", "import sys; from hawkvision.cli import main; sys.argv[0] = 'hawkvision'; main()"]
    line = [*entry, *rest, "--help"] if command else [sys.executable, *rest, "--help"]
    ran = subprocess.run(line, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert all(option in ran.stdout for option in rest if option.startswith("--"))


# ------------------------------------------------------------------------------------------------ Prometheus


def prometheus() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text(encoding="utf-8"))
    return document


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def keyed(authority: Authority) -> Iterator[ServerProcess]:
    pair = authority.certify("node")
    served = ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key), "--api-key", KEY)
    with running("edge", "--port", "0", "--backend", "noop", *served) as node:
        yield node


def scraped(node: ServerProcess, job: dict[str, Any], key: str, authority: Authority) -> tuple[int, str]:
    """What Prometheus would get of a node by a job, as its documentation says."""
    assert set(job["tls_config"]) == {"ca_file"}
    given = {"Authorization": f"{job['authorization']['type']} {key}"}
    asked = urllib.request.Request(f"{job['scheme']}://127.0.0.1:{node.port}{job['metrics_path']}", headers=given)
    try:
        with urllib.request.urlopen(asked, context=authority.client()) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


@pytest.mark.parametrize("job", prometheus()["scrape_configs"], ids=lambda job: job["job_name"])
def test_prometheus_gets_a_keyed_nodes_metrics_by_the_example(
    keyed: ServerProcess, authority: Authority, job: dict[str, Any]
) -> None:
    """Both tiers ask for their keys in the same way."""
    status, page = scraped(keyed, job, KEY, authority)
    assert status == 200
    names = {family.name for family in text_string_to_metric_families(page)}
    assert {"hawkvision_build_info", "process_resident_memory_bytes", "process_open_fds"} <= names
    assert scraped(keyed, job, "another", authority)[0] == 401
    assert job["authorization"]["credentials_file"].endswith(".key")
    assert not re.search(r"(?i)credentials:", (DEPLOY / "prometheus.yaml").read_text(encoding="utf-8"))


def test_the_ports_of_the_example_are_the_tiers_own() -> None:
    ports = {
        job["job_name"]: job["static_configs"][0]["targets"][0].split(":")[1] for job in prometheus()["scrape_configs"]
    }
    assert ports == {
        "hawkvision-edge": str(EdgeConfig().port),
        "hawkvision-datacenter": str(DatacenterConfig().port),
    }


def test_alerts_are_about_metrics_that_exist(keyed: ServerProcess, authority: Authority) -> None:
    _, page = scraped(keyed, prometheus()["scrape_configs"][0], KEY, authority)
    tier = DatacenterMetrics()
    tier.watch_tls(lambda: (0.0, 0))
    declared = set(re.findall(r"(?m)^# TYPE (\w+) ", page + tier.exposition().decode()))
    (file,) = prometheus()["rule_files"]
    rules = yaml.safe_load((DEPLOY / file).read_text(encoding="utf-8"))["groups"][0]["rules"]
    named = {name for rule in rules for name in re.findall(r"\b(?:ray_)?(hawkvision_\w+)", rule["expr"])}
    assert named
    assert named <= declared


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus")
def test_promtool_takes_the_example(tmp_path: Path, authority: Authority) -> None:
    text = (DEPLOY / "prometheus.yaml").read_text(encoding="utf-8")
    for job in prometheus()["scrape_configs"]:
        key = Path(job["authorization"]["credentials_file"])
        (tmp_path / key.name).write_text(KEY)
        text = text.replace(str(key), str(tmp_path / key.name))
        text = text.replace(job["tls_config"]["ca_file"], str(authority.path))
    (tmp_path / "prometheus.yaml").write_text(text)
    shutil.copy(DEPLOY / "hawkvision-alerts.yaml", tmp_path)
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------------------- systemd


UNITS = ("hawkvision-edge.service", "hawkvision-datacenter.service")


def unit(name: str = UNITS[0]) -> dict[str, list[str]]:
    """The unit's assignments, whatever their section."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / name).read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_units_wait_longer_than_what_they_start_drains() -> None:
    config = load_config(EdgeConfig, DEPLOY / "edge.toml", environ={})
    assert config.drain_timeout_s < float(unit()["TimeoutStopSec"][0])
    assert float(unit(UNITS[1])["TimeoutStopSec"][0]) > DRAIN_S + STOP_S


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_a_module_that_exists_with_options_that_exist(name: str) -> None:
    _, *words = unit(name)["ExecStart"][0].split()
    ran = subprocess.run([sys.executable, *words[:2], "--help"], capture_output=True, text=True)
    assert all(word in ran.stdout for word in words[2:] if word.startswith("--"))
    assert (DEPLOY / Path(words[-1]).name).is_file()


@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(tmp_path: Path, name: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / name).read_text(encoding="utf-8")
    # The interpreter of an installed node is not on this machine; this one stands in for it.
    path = tmp_path / name
    path.write_text(text.replace("/opt/hawkvision/bin/python", sys.executable), encoding="utf-8")
    ran = subprocess.run(["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_settings_of_the_datacenters_unit_are_usable() -> None:
    config = load_config(DatacenterConfig, DEPLOY / "datacenter.toml", environ={"HAWKVISION_DC_API_KEY": KEY})
    assert (config.host, config.port) == ("127.0.0.1", DatacenterConfig().port)


def test_the_page_names_this_version_and_files_that_are_there() -> None:
    page = (ROOT / "docs" / "operations" / "deployment.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?<![\d.])\d+\.\d+\.\d+(?![\d.])", page)) == {__version__}
    named = re.findall(r"edge/deploy/[\w.-]+\w(?![\w.*])", page)
    assert {name for name in named if not (ROOT / name).exists()} <= {"edge/deploy/.env"}


# ------------------------------------------------------------------------------------------- the state of streams


def test_the_state_file_lies_where_the_node_may_write_and_where_it_outlives_it() -> None:
    name = "HAWKVISION_EDGE_STATE_FILE"
    service = compose()["services"]["edge"]
    folder = service["environment"][name].rpartition("/")[0]
    assert f"state:{folder}" in service["volumes"]
    assert "state" in compose()["volumes"]

    values = {variable["name"]: variable.get("value") for variable in pod()["containers"][0]["env"]}
    mounts = {mount["mountPath"]: mount for mount in pod()["containers"][0]["volumeMounts"]}
    mount = mounts[str(values[name]).rpartition("/")[0]]
    assert not mount.get("readOnly", False)
    kept = {"name": mount["name"], "hostPath": {"path": "/var/lib/hawkvision-state", "type": "Directory"}}
    assert kept in pod()["volumes"]

    (state_directory,) = unit()["StateDirectory"]
    assert f"{name}=%S/{state_directory}/streams.sqlite3" in unit()["Environment"]


def test_the_image_has_the_states_folder_for_its_own_user() -> None:
    folder = compose()["services"]["edge"]["environment"]["HAWKVISION_EDGE_STATE_FILE"].rpartition("/")[0]
    made = next(rest for name, rest in instructions() if name == "RUN" and "install -d -o 10001" in rest)
    assert folder in made
