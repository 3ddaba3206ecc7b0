"""Settings: where they come from, which wins, and how mistakes are named."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.access import is_loopback
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
from hawkvision.core.settings.load import SECTIONS, load_config, read_command_line, settings_of, settings_of_tasks


def up(kind: Any, words: list[str]) -> Any:
    return read_command_line(kind, words, "hawkvision up", "Start.")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hawkvision.toml"
    path.write_text(text)
    return path


def test_defaults_listen_on_loopback_only() -> None:
    assert load_config(EdgeConfig, environ={}).host == "127.0.0.1"
    assert load_config(DatacenterConfig, environ={}).host == "127.0.0.1"


def test_file_then_environment_then_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[edge]\nport = 1\nworkers = 1\nmax_queue = 1\n[dc]\nport = 9\n")
    config = load_config(
        EdgeConfig,
        path,
        overrides={"port": 3, "task": None},
        environ={"HAWKVISION_EDGE_PORT": "2", "HAWKVISION_EDGE_WORKERS": "2", "HAWKVISION_DC_PORT": "7"},
    )
    assert (config.port, config.workers, config.max_queue, config.task) == (3, 2, 1, "imagenet")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[edge]\nprot = 1\n", r"hawkvision.toml: \[edge\].*unknown field `prot`"),
        ("[edge]\nport = 99999\n", r"\$.port"),
        ('[edge]\nbackend = "tensorflow"\n', "tensorflow"),
        ("[egde]\nport = 1\n", r"unknown section \[egde\]; expected one of \['dc', 'edge'\]"),
        ("edge = 3\n", "must be a table"),
        ("[edge\n", "hawkvision.toml"),
    ],
)
def test_mistakes_in_files_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(EdgeConfig, write(tmp_path, text), environ={})


THERE = {"datacenter_url": "http://h:1/a/"}
TWO = {"tasks": ["a", "b"]}


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        *((EdgeConfig, {key: ""}, key) for key in ("cache_dir", "profile", "variant", "datacenter_api_key")),
        (EdgeConfig, {"datacenter_url": "h:8090"}, r"edge\.datacenter_url: expected http://HOST"),
        (
            EdgeConfig,
            {"datacenter_transport": "auto"},
            r"edge\.datacenter_transport = 'auto': missing edge\.datacenter_url",
        ),
        (EdgeConfig, {**THERE, "datacenter_transport": "pigeon"}, r"\$\.datacenter_transport"),
        (EdgeConfig, {"audit_share": 0.3}, r"\$\.audit_share"),
        (EdgeConfig, {"audit_share": -0.1}, r"\$\.audit_share"),
        (EdgeConfig, {"max_streams": 0}, r"\$\.max_streams"),
        (EdgeConfig, {"tasks": ["a", "a"]}, "edge.tasks: expected each task once, got a, a"),
        (EdgeConfig, {"tasks": ["a"], "task": "b"}, "task and tasks are both given"),
        (EdgeConfig, {"task": "a,b"}, r"edge\.task = 'a,b': expected one task; for several: --tasks a,b"),
        (EdgeConfig, {**TWO, "variant": "x"}, r"edge.variant = 'x' is of one task.*a.variant=x"),
        (EdgeConfig, {**TWO, "memory_bytes": 40_000_000}, "at least 33554432 for each of 2 tasks"),
        (EdgeConfig, {**TWO, "task_settings": ["b.backend=x"]}, r"b.backend=x: Expected one of auto"),
        (EdgeConfig, {**TWO, "task_settings": ["b.port=1"]}, "'port' is no setting of a task; those are variant"),
        (EdgeConfig, {**TWO, "task_settings": ["c.workers=1"]}, "of task 'c'; served are a, b"),
        (EdgeConfig, {"task_settings": ["workers=1"]}, "expected TASK.SETTING=VALUE, got 'workers=1'"),
        (EdgeConfig, {"task": "a", "task_settings": ["a.workers=1", "a.workers=2"]}, "a.workers is given twice"),
        (DatacenterConfig, {"profile": "p"}, "unknown field `profile`"),
        (DatacenterConfig, {"tasks": ["c", "d", "c"]}, r"dc\.tasks: expected each task once, got c, d, c"),
        *(
            (DatacenterConfig, {"app_name": name}, r"dc\.app_name: expected at most 63 letters")
            for name in ("", "-eyes", "two words", "a#b", "a/b", "x" * 64)
        ),
        (DatacenterConfig, {"route_prefix": "vision"}, r"dc\.route_prefix: expected / or a path"),
        (DatacenterConfig, {"min_replicas": 3}, r"dc\.min_replicas = 3: expected at most dc\.max_replicas = 1"),
        (
            DatacenterConfig,
            {"max_replicas": 4, "target_ongoing_requests": 40},
            r"dc\.target_ongoing_requests = 40: expected at most dc\.max_ongoing_requests = 32",
        ),
        (DatacenterConfig, {"max_replicas_per_node": 0}, r"Expected `int` >= 1 - at `\$\.max_replicas_per_node`"),
        (DatacenterConfig, {"num_cpus": 0}, r"Expected `float` > 0.0 - at `\$\.num_cpus`"),
    ],
)
def test_mistakes_in_settings_are_named(kind: Any, given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(kind, overrides=given, environ={})


def test_mistakes_in_variables_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment HAWKVISION_EDGE_\*.*prot"):
        load_config(EdgeConfig, environ={"HAWKVISION_EDGE_PROT": "1"})
    with pytest.raises(ConfigError, match="cache_dir"):
        load_config(EdgeConfig, environ={"HAWKVISION_EDGE_CACHE_DIR": ""})
    assert load_config(DatacenterConfig, environ={"HAWKVISION_DC_VARIANTS": ""}).variants == ()
    with pytest.raises(ConfigError, match=r"length >= 1.*\$\.variants\[1\]"):
        load_config(DatacenterConfig, environ={"HAWKVISION_DC_VARIANTS": "reference,"})
    with pytest.raises(ConfigError, match=r"none\.toml: no such configuration file"):
        load_config(EdgeConfig, tmp_path / "none.toml", environ={})


def test_a_target_does_not_matter_where_the_number_of_replicas_is_fixed() -> None:
    given = {"target_ongoing_requests": 40, "max_ongoing_requests": 1}
    assert load_config(DatacenterConfig, overrides=given, environ={}).target_ongoing_requests == 40.0


@pytest.mark.parametrize(("written", "read"), [("A, B", ("A", "B")), (" A ,B ", ("A", "B")), ("A", ("A",))])
def test_blanks_around_the_words_of_a_list_mean_nothing(written: str, read: tuple[str, ...]) -> None:
    assert load_config(EdgeConfig, environ={"HAWKVISION_EDGE_ONNX_PROVIDERS": written}).onnx_providers == read
    assert up(EdgeConfig, ["--onnx-providers", written]).onnx_providers == read


def test_paths_begin_at_home_where_they_say_so(tmp_path: Path) -> None:
    config = load_config(EdgeConfig, write(tmp_path, '[edge]\ncache_dir = "~/models"\n'), environ={})
    assert config.cache_dir == Path.home() / "models"
    with pytest.raises(ConfigError, match=r"~nobody-of-that-name/x.*\$\.profile"):
        load_config(EdgeConfig, environ={"HAWKVISION_EDGE_PROFILE": "~nobody-of-that-name/x"})


@pytest.mark.parametrize("kind", [EdgeConfig, DatacenterConfig])
def test_nothing_listens_beyond_loopback_without_a_key(kind: type) -> None:
    with pytest.raises(ConfigError, match="api_key must be set"):
        load_config(kind, overrides={"host": "0.0.0.0"}, environ={})
    keyed = {"host": "0.0.0.0", "api_key": "a-secret-of-ours"}
    with pytest.raises(ConfigError, match=r"tls_certificate and .*tls_key, or .*allow_plain_http = true"):
        load_config(kind, overrides=keyed, environ={})
    assert load_config(kind, overrides=keyed | {"allow_plain_http": True}, environ={}).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("edge.example", False)],
)  # fmt: skip
def test_loopback_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_every_setting_is_an_option(tmp_path: Path) -> None:
    words = ["--port", "0", "--onnx-providers", "A,B", "--config", str(write(tmp_path, "[edge]\nworkers = 3\n"))]
    words += ["--audit-share", "0", "--datacenter-url", THERE["datacenter_url"], "--datacenter-transport", "tcp"]
    config = up(EdgeConfig, words)
    assert (config.port, config.onnx_providers, config.workers) == (0, ("A", "B"), 3)
    assert (config.audit_share, config.datacenter_url, config.datacenter_transport) == (0.0, "http://h:1/a/", "tcp")


KUBERNETES = {
    "HAWKVISION_EDGE_PORT": "tcp://10.43.7.8:80",
    "HAWKVISION_EDGE_SERVICE_HOST": "10.43.7.8",
    "HAWKVISION_EDGE_SERVICE_PORT": "80",
    "HAWKVISION_EDGE_SERVICE_PORT_HTTP": "80",
    "HAWKVISION_EDGE_PORT_80_TCP": "tcp://10.43.7.8:80",
    "HAWKVISION_EDGE_PORT_80_TCP_PROTO": "tcp",
    "HAWKVISION_EDGE_PORT_80_TCP_PORT": "80",
    "HAWKVISION_EDGE_PORT_80_TCP_ADDR": "10.43.7.8",
    "HAWKVISION_EDGE_DATAGRAM_PORT": "udp://[fd00::7]:8081",  # of a service called hawkvision-edge-lossy
    "HAWKVISION_EDGE_DATAGRAM_SERVICE_HOST": "fd00::7",
    "HAWKVISION_EDGE_DATAGRAM_PORT_8081_UDP_ADDR": "fd00::7",
}


def test_what_kubernetes_sets_for_a_service_is_passed_over_and_said(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(EdgeConfig, environ={**KUBERNETES, "HAWKVISION_EDGE_MAX_QUEUE": "7"})
    assert config == EdgeConfig(max_queue=7)
    assert f"{', '.join(sorted(KUBERNETES))}: ignored, Kubernetes sets them for a service" in caplog.text


def test_what_only_looks_like_a_service_is_a_setting_still() -> None:
    assert load_config(EdgeConfig, environ={"HAWKVISION_EDGE_PORT": "81"}).port == 81
    with pytest.raises(ConfigError, match=r"\$\.port"):
        load_config(EdgeConfig, environ={"HAWKVISION_EDGE_PORT": "tcp"})
    with pytest.raises(ConfigError, match="service"):
        load_config(EdgeConfig, environ={"HAWKVISION_EDGE_SERVICE": "1"})


@pytest.mark.parametrize("kind", [EdgeConfig, DatacenterConfig])
def test_no_setting_has_a_name_that_kubernetes_uses(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    for name in (setting.name for setting in settings_of(kind)):
        with contextlib.suppress(ConfigError):  # the value is of any type
            load_config(kind, environ={f"{SECTIONS[kind][1]}{name.upper()}": "1"})
    assert "ignored" not in caplog.text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--allow-plain-http"], True),
        (["--allow-plain-http", "--port", "0"], True),
        (["--allow-plain-http", "false"], False),
        (["--allow-plain-http=true"], True),
    ],
)
def test_a_switch_may_be_given_without_a_value(words: list[str], expected: bool) -> None:
    assert up(EdgeConfig, words).allow_plain_http is expected


@pytest.mark.parametrize(("words", "says"), [(["--prot", "1"], "--prot"), (["--port"], "--port"), (["x"], "x")])
def test_words_that_are_no_options_are_a_wrong_command_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        up(EdgeConfig, words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_of_a_task_and_several_tasks_the_later_source_wins(tmp_path: Path) -> None:
    path = write(tmp_path, '[edge]\ntasks = ["a", "b"]\n')
    assert tuple(settings_of_tasks(load_config(EdgeConfig, path, environ={}))) == ("a", "b")
    assert tuple(settings_of_tasks(load_config(EdgeConfig, path, {"task": "c"}, {}))) == ("c",)
    from_environment = load_config(EdgeConfig, path, {"tasks": ["d"]}, {"HAWKVISION_EDGE_TASK": "c"})
    assert tuple(settings_of_tasks(from_environment)) == ("d",)


def test_tasks_share_bounds_in_equal_parts_and_override_settings() -> None:
    words = ["b.variant=small", "b.max_queue=3", "b.backend=noop"]
    config = load_config(
        EdgeConfig, overrides={"tasks": ["a", "b"], "memory_bytes": 100_000_000, "task_settings": words}, environ={}
    )
    a, b = settings_of_tasks(config).values()
    assert (a.task, a.variant, a.max_queue, a.memory_bytes, a.backend) == ("a", None, 128, 50_000_000, "auto")
    assert (b.task, b.variant, b.max_queue, b.memory_bytes, b.backend) == ("b", "small", 3, 50_000_000, "noop")
