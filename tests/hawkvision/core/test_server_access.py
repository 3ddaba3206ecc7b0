"""URLs of servers: what is taken, and errors that say what was expected and repeat no password."""

from __future__ import annotations

import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.core.server_access import check_route_prefix, check_server_url


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("http://dc", ("dc", None, "")),
        ("https://dc.example:8443/", ("dc.example", 8443, "/")),
        ("http://[fd00::7]:8090/vision", ("fd00::7", 8090, "/vision")),
        ("HTTP://dc/a/b.c/~d/", ("dc", None, "/a/b.c/~d/")),
        ("http://dc/team%201/@home", ("dc", None, "/team%201/@home")),
    ],
)
def test_a_server_may_answer_below_a_path(url: str, parts: tuple[str, int | None, str]) -> None:
    found = check_server_url("url", url)
    assert (found.hostname, found.port, found.path) == parts


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://dc/vision?task=cifar10", "with a query or a fragment"),
        ("http://dc/vision#top", "with a query or a fragment"),
        ("http://dc/?", "with a query or a fragment"),
        ("http://me:hidden@dc/vision", "user name or password"),
        ("http://hidden@dc", "user name or password"),
        ("https://:hidden@dc:port", "user name or password"),
        ("http://me:hidden@[::1", "user name or password"),
        ("http://dc//v1", "whose path is malformed"),
        ("http://dc/a/../b", "whose path is malformed"),
        ("http://dc/ü", "whose path is malformed"),
        ("dc:8090/vision", "expected http://HOST"),
        ("http:///vision", "expected http://HOST"),
        ("http://a b", "expected http://HOST"),
        ("http://h\n", "expected http://HOST"),
        ("http://h:99999", "expected http://HOST"),
        ("ftp://h", "expected http://HOST"),
        ("http://dc:0/vision", "expected http://HOST"),
    ],
)
def test_other_urls_are_refused_with_the_reason_and_without_their_password(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_server_url("edge.datacenter_url", url)
    assert str(caught.value).startswith("edge.datacenter_url: expected http://HOST[:PORT][/PATH]")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["/", "/vision", "/a/b-c/d_e.f~g", "/v1"])
def test_a_route_prefix_is_a_path(prefix: str) -> None:
    check_route_prefix("dc.route_prefix", prefix)


@pytest.mark.parametrize(
    "prefix", ["", "vision", "/vision/", "//", "/a//b", "/a b", "/{x}", "/a?b", "/..", "/a/.", "/é", "/a\n"]
)
def test_other_route_prefixes_are_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"dc\.route_prefix: expected / or a path such as /vision"):
        check_route_prefix("dc.route_prefix", prefix)


def test_the_path_of_ray_serve_itself_is_not_free() -> None:
    with pytest.raises(ConfigError, match="Ray Serve answers below /- itself"):
        check_route_prefix("dc.route_prefix", "/-/vision")
