"""Keys at a real node: scopes, rates, and changes of the key file."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hawkvision.client.blocking import Client
from hawkvision.core.errors import ConfigError, Forbidden, Overloaded, Unauthorized
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
from hawkvision.core.settings.load import load_config
from hawkvision.servers.keys import INFER, Keys
from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller, Reply
from tests.edge.servers.conftest import SINGLE
from tests.images import encoded
from tests.waiting import wait_until

ENTRY = "import sys; from hawkvision.cli import main; sys.argv[0] = 'hawkvision'; main()"


def hawkvision(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ENTRY, *words], capture_output=True, text=True)


def make(path: Path, name: str, *scopes: str, rate: float | None = None) -> str:
    """A key, as an operator makes one."""
    words = [word for scope in scopes for word in ("--scope", scope)]
    made = hawkvision("keys", "add", name, *words, *(("--rate", str(rate)) if rate else ()), "--file", str(path))
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


@pytest.fixture
def caller(keyed: ServerProcess) -> Iterator[Caller]:
    with closing(Caller(keyed)) as caller:
        yield caller


def ask(caller: Caller, key: str, path: str, method: str = "GET") -> Reply:
    body = encoded() if method == "POST" else None
    return caller.send(method, path, body, {"Authorization": f"Bearer {key}"})


# ---------------------------------------------------------------------------------------------------- scopes


@pytest.mark.parametrize(
    ("method", "asked", "camera", "prometheus", "operator"),
    [
        ("POST", "/v1/classify", 200, 403, 403),
        ("POST", "/v2/models/imagenet/infer", 400, 403, 403),
        ("GET", "/v1/transport", 200, 200, 200),
        ("GET", "/v2/models/imagenet", 200, 200, 403),
        ("GET", "/metrics", 403, 200, 403),
        ("GET", "/v1/status", 403, 200, 403),
        ("GET", "/v1/status/answers/0/image", 403, 403, 403),
        ("GET", "/v1/targets", 200, 200, 403),
        ("GET", "/docs", 200, 200, 200),
        ("GET", "/openapi.json", 200, 200, 403),
        ("GET", "/nowhere", 403, 404, 403),
        ("POST", "/metrics", 403, 403, 405),
        ("DELETE", "/v1/targets", 403, 403, 405),
        ("GET", "/healthz", 200, 200, 200),
        ("GET", "/v2/health/ready", 200, 200, 200),
    ],
)
def test_a_key_does_what_its_scopes_allow(
    caller: Caller, keys: dict[str, str], method: str, asked: str, camera: int, prometheus: int, operator: int
) -> None:
    found = tuple(ask(caller, keys[name], asked, method).status for name in ("camera", "prometheus", "operator"))
    assert found == (camera, prometheus, operator)
    assert ask(caller, SINGLE, asked, method).status not in (401, 403)
    if asked not in ("/healthz", "/v2/health/ready", "/v1/transport", "/docs"):
        assert ask(caller, "a-key-that-is-none", asked, method).status == 401


def test_refusals_say_what_is_missing(keyed: ServerProcess, caller: Caller, keys: dict[str, str]) -> None:
    wrong = ask(caller, "a-key-that-is-none", "/v1/classify", "POST")
    assert (wrong.json["code"], wrong.headers["www-authenticate"]) == ("unauthorized", "Bearer")
    forbidden = ask(caller, keys["prometheus"], "/v1/classify", "POST")
    assert forbidden.json == {
        "error": "the key 'prometheus' may observe; this needs a key that may infer",
        "code": "forbidden",
    }
    with (
        Client(keyed.url, api_key=keys["prometheus"]) as client,
        pytest.raises(Forbidden, match="'prometheus' may observe"),
    ):
        client.classify(encoded())
    with Client(keyed.url, api_key=keys["camera"] + "\r\n") as client:
        assert client.classify(encoded()).tier == "edge"


def test_requests_are_counted_by_the_name_of_their_key(caller: Caller, keys: dict[str, str]) -> None:
    def counted(key: str, outcome: str) -> float:
        text = ask(caller, SINGLE, "/metrics").body.decode()
        start = f'hawkvision_key_requests_total{{key="{key}",outcome="{outcome}"}} '
        (line,) = [line for line in text.splitlines() if line.startswith(start)]
        return float(line.removeprefix(start))

    series = (("camera", "accepted"), ("camera", "forbidden"), ("unknown", "unauthorized"))
    before = [counted(*each) for each in series]
    ask(caller, keys["camera"], "/v1/classify", "POST")
    ask(caller, keys["camera"], "/metrics")
    for number in range(3):
        ask(caller, f"a-key-that-is-none-{number}", "/metrics")
    assert [counted(*each) - old for each, old in zip(series, before, strict=True)] == [1, 1, 3]
    text = ask(caller, SINGLE, "/metrics").body.decode()
    assert "a-key-that-is-none" not in text
    assert SINGLE not in text


# --------------------------------------------------------------------------------------- rates, and new files


def test_a_key_beyond_its_rate_is_told_when_to_retry(keyed: ServerProcess, key_file: Path, caller: Caller) -> None:
    key = make(key_file, "slow-camera", "infer", rate=0.01)
    wait_until(lambda: ask(caller, key, "/v2").status == 200)  # the file was read again by itself
    refused = ask(caller, key, "/v1/classify", "POST")
    assert (refused.status, refused.json["code"]) == (429, "overloaded")
    assert 90 <= int(refused.headers["retry-after"]) <= 100
    with Client(keyed.url, api_key=key) as client, pytest.raises(Overloaded, match=r"used up its 0\.01 requests"):
        client.classify(encoded())
    assert ask(caller, SINGLE, "/v1/classify", "POST").status == 200


def test_a_removed_key_is_refused_on_a_connection_that_is_open(
    keyed: ServerProcess, key_file: Path, caller: Caller, keys: dict[str, str]
) -> None:
    key = make(key_file, "visitor", "infer")
    keyed.process.send_signal(signal.SIGHUP)
    wait_until(lambda: ask(caller, key, "/v1/classify", "POST").status == 200)
    assert hawkvision("keys", "remove", "visitor", "--file", str(key_file)).returncode == 0
    wait_until(lambda: ask(caller, key, "/v1/classify", "POST").status == 401)
    assert ask(caller, keys["camera"], "/v1/classify", "POST").status == 200


def test_a_broken_key_file_is_logged_and_the_keys_stay(
    keyed: ServerProcess, key_file: Path, caller: Caller, keys: dict[str, str]
) -> None:
    good = key_file.read_bytes()
    key_file.write_bytes(good + b"[keys.half]\nsha256 = ")
    keyed.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "keys: the previous files stay in use" in keyed.output())
    assert ask(caller, keys["camera"], "/v1/classify", "POST").status == 200
    key_file.write_bytes(good)


def test_keys_are_shown_by_name_and_never_in_full(key_file: Path, keys: dict[str, str]) -> None:
    shown = hawkvision("keys", "list", "--file", str(key_file))
    assert shown.returncode == 0
    for name, key in keys.items():
        assert name in shown.stdout
        assert key not in shown.stdout


def test_an_unknown_scope_is_named(tmp_path: Path) -> None:
    said = hawkvision("keys", "add", "x", "--scope", "admin", "--file", str(tmp_path / "keys.toml"))
    assert (said.returncode, said.stdout) == (1, "")
    assert "--scope: expected infer, observe, operate, review, got 'admin'" in said.stderr


# ----------------------------------------------------------------------------------------- keys as settings


@pytest.mark.parametrize("where", ["variable", "file"])
def test_a_line_end_after_the_key_is_ignored(where: str, tmp_path: Path) -> None:
    settings = tmp_path / "edge.toml"
    settings.write_text(f'[edge]\napi_key = "{SINGLE}\\r\\n"\n')
    environ = {"HAWKVISION_EDGE_API_KEY": SINGLE + "\r"} if where == "variable" else {}
    config = load_config(EdgeConfig, environ=environ, path=settings if where == "file" else None)
    keys = Keys(config.api_key, None, where="edge.api_key")
    for key in (SINGLE, SINGLE + "\r\n"):
        assert keys.authorize(f"Bearer {key}", INFER)
    with pytest.raises(Unauthorized):
        keys.authorize("Bearer another-key-of-ours", INFER)


@pytest.mark.parametrize("kind", [EdgeConfig, DatacenterConfig])
@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("abcdef\r", r"api_key: expected a key of at least 16 characters, got 6"),
        ("with a blank in its middle", r"api_key: expected visible ASCII characters without blanks"),
        (" \n", r"api_key: expected a key, got an empty text"),
    ],
)
def test_a_key_that_cannot_work_is_refused_at_the_start(kind: type[EdgeConfig], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(kind, environ={"HAWKVISION_EDGE_API_KEY": key, "HAWKVISION_DC_API_KEY": key})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tls_key", "a.key", "tls_certificate and .*tls_key belong together"),
        ("tls_client_ca", "ca.pem", "tls_client_ca: missing .*tls_certificate"),
        ("tls_minimum_version", "1.1", "Expected one of 1.2, 1.3, got '1.1'"),
        ("datacenter_ca", "ca.pem", "datacenter_ca belongs to an edge.datacenter_url of https"),
        ("datacenter_certificate", "a.pem", "datacenter_certificate and edge.datacenter_key belong together"),
    ],
)
def test_incomplete_settings_are_refused(key: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(EdgeConfig, overrides={key: value, "datacenter_url": "http://127.0.0.1:1"}, environ={})


def test_a_node_that_would_be_unsafe_does_not_start() -> None:
    words = ("--port", "0", "--backend", "noop", "--host", "0.0.0.0", "--api-key", SINGLE)
    started = subprocess.run([sys.executable, "-m", "edge", *words], capture_output=True, text=True)
    assert (started.returncode, started.stdout) == (1, "")
    assert "allow_plain_http = true" in started.stderr
    assert "Traceback" not in started.stderr


def test_plain_http_beyond_loopback_is_served_where_it_is_wanted() -> None:
    given = ("--host", "0.0.0.0", "--port", "0", "--backend", "noop", "--api-key", SINGLE, "--allow-plain-http")
    with running("edge", *given) as node, closing(Caller(node)) as caller:
        assert ask(caller, SINGLE, "/v1/targets").status == 200
        wait_until(lambda: "without TLS" in node.output())
