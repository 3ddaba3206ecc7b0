"""CORS: pre-flight without a key, exposed headers, and errors that pages may read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.servers.cors import check_origins
from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller, Reply
from tests.images import encoded

SHOP = "https://shop.example"
WORD = "a-key-for-tests-of-pages"
KEY = {"Authorization": f"Bearer {WORD}"}


@pytest.fixture(scope="module")
def listed() -> Iterator[ServerProcess]:
    origins = f"{SHOP},http://192.168.1.7:3000"
    with running("edge", "--port", "0", "--backend", "noop", "--api-key", WORD, "--cors-origins", origins) as node:
        yield node


def vary(reply: Reply) -> set[str]:
    return {name.strip().lower() for name in reply.headers.get("vary", "").split(",")}


def preflight(node: ServerProcess, origin: str, path: str = "/v1/classify", method: str = "POST") -> Reply:
    caller = Caller(node)
    try:
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": method,
            "Access-Control-Request-Headers": "authorization,content-type,x-hawkvision-quality,traceparent",
            "Access-Control-Request-Private-Network": "true",
        }
        return caller.send("OPTIONS", path, headers=asked)
    finally:
        caller.close()


@pytest.mark.parametrize(
    ("path", "method"),
    [("/v1/classify", "POST"), ("/v1/targets", "GET"), ("/v2/models/x/infer", "POST"), ("/v1/review/1", "DELETE")],
)
@pytest.mark.parametrize("origin", [SHOP, "http://192.168.1.7:3000"])
def test_a_pre_flight_of_a_listed_origin_is_answered_without_a_key(
    listed: ServerProcess, origin: str, path: str, method: str
) -> None:
    reply = preflight(listed, origin, path, method)
    assert reply.status in (200, 204)
    assert reply.headers["access-control-allow-origin"] == origin
    assert method in reply.headers["access-control-allow-methods"]
    allowed = reply.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in ("authorization", "content-type", "x-hawkvision-quality", "traceparent"))
    assert reply.headers["access-control-allow-private-network"] == "true"
    assert int(reply.headers["access-control-max-age"]) > 0
    assert "origin" in vary(reply)


def test_a_pre_flight_of_another_origin_is_refused(listed: ServerProcess) -> None:
    reply = preflight(listed, "https://evil.example")
    assert reply.status == 400
    assert "access-control-allow-origin" not in reply.headers


def asked(node: ServerProcess, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
    caller = Caller(node)
    try:
        return caller.send(method, path, body, headers)
    finally:
        caller.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/v1/classify?quality=fast", encoded(), KEY, 200),
        ("POST", "/v1/classify?quality=fast", encoded(".png", 256, 400), KEY, 200),
        ("POST", "/v1/classif%79?quality=fast", encoded(), KEY, 200),
        ("POST", "/v1/classify?colour=red", encoded(), KEY, 400),
        ("POST", "/v1/classify", encoded(), {}, 401),
        ("POST", "/v1/classify", b"hello", KEY, 415),
        ("POST", "/v2/models/imagenet/infer", b"{", KEY, 400),
        ("GET", "/v1/classify", None, KEY, 405),
        ("GET", "/v1/targets", None, KEY, 200),
        ("GET", "/nowhere", None, KEY, 404),
        ("GET", "/metrics", None, {}, 401),
        ("OPTIONS", "/v1/classify", None, KEY, 405),
    ],
)
def test_answers_and_errors_may_be_read_by_pages_of_a_listed_origin_and_no_other(
    listed: ServerProcess, method: str, path: str, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    ours = asked(listed, method, path, body, {**headers, "Origin": SHOP})
    assert (ours.status, ours.headers["access-control-allow-origin"]) == (status, SHOP)
    assert {"traceparent", "server-timing", "retry-after"} <= set(
        ours.headers["access-control-expose-headers"].split(", ")
    )
    others = asked(listed, method, path, body, {**headers, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in others.headers
    assert [vary(reply) for reply in (ours, others)] == [{"origin"}, {"origin"}]


def test_without_the_setting_pages_of_other_sites_are_refused_and_no_cors_headers_are_sent(caller: Caller) -> None:
    reply = caller.classify(encoded(), "quality=fast", Origin=SHOP)
    assert reply.status == 403
    assert not [name for name in reply.headers if name.startswith("access-control") or name == "vary"]
    assert (
        caller.send("OPTIONS", "/v1/classify", headers={"Origin": SHOP, "Access-Control-Request-Method": "POST"}).status
        == 405
    )


@pytest.mark.parametrize(
    "origins", [["https://shop.example/"], ["shop.example"], ["HTTPS://shop.example"], ["https://a:443"], ["*", SHOP]]
)
def test_an_invalid_origin_is_refused_at_the_start(origins: list[str]) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        check_origins("edge.cors_origins", origins)
    check_origins("edge.cors_origins", [SHOP, "http://localhost:3000", "http://[::1]:8080", "null", "app://page"])
