"""A node and a datacenter that speaks TLS: whom the node trusts, what it shows, and what callers see meanwhile."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from hawkvision.system.child_server import ServerProcess, running
from tests.authority import Authority, replace
from tests.edge.conftest import Caller, Reply
from tests.edge.peer import Peer, running_peer
from tests.images import encoded
from tests.waiting import wait_until


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextmanager
def beside(peer: Peer, *arguments: str) -> Iterator[tuple[ServerProcess, Caller]]:
    """A node whose datacenter is the peer, and a caller of it."""
    with (
        running("edge", "--port", "0", "--backend", "noop", "--datacenter-url", peer.url, *arguments) as node,
        closing(Caller(node)) as caller,
    ):
        yield node, caller


def best(caller: Caller) -> Reply:
    reply = caller.classify(encoded(), "quality=best")
    assert reply.status == 200
    return reply


def from_datacenter(caller: Caller) -> bool:
    found = best(caller).json
    assert found["tier"] == "datacenter" or found["degraded"], "what the datacenter did not answer is said to be less"
    return bool(found["tier"] == "datacenter")


def test_an_expired_certificate_is_logged_and_answers_are_degraded(authority: Authority) -> None:
    pair = authority.certify("expired", days=-1)
    with (
        running_peer(tls=authority.server(pair)) as peer,
        beside(peer, "--datacenter-ca", str(authority.path)) as (node, caller),
    ):
        assert not from_datacenter(caller)
        wait_until(
            lambda: "its certificate is not trusted: certificate has expired (edge.datacenter_ca says" in node.output()
        )
        assert not from_datacenter(caller)
        assert peer.bodies == []


def test_a_certificate_for_another_name_is_rejected(authority: Authority) -> None:
    pair = authority.certify("elsewhere", "datacenter.example")
    with (
        running_peer(tls=authority.server(pair)) as peer,
        beside(peer, "--datacenter-ca", str(authority.path)) as (node, caller),
    ):
        assert not from_datacenter(caller)
        wait_until(lambda: "IP address mismatch" in node.output())


def test_a_corrected_authority_is_trusted_without_a_restart(authority: Authority, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(Authority(tmp_path, "another authority").path.read_bytes())
    pair = authority.certify("datacenter")
    with (
        running_peer(tls=authority.server(pair)) as peer,
        beside(peer, "--datacenter-ca", str(trusted)) as (node, caller),
    ):
        assert not from_datacenter(caller)
        wait_until(lambda: "its certificate is not trusted: unable to get local issuer certificate" in node.output())
        replace(trusted, authority.path.read_bytes())
        wait_until(lambda: from_datacenter(caller))


def test_a_datacenter_that_requires_a_client_certificate_gets_the_nodes(authority: Authority) -> None:
    context = authority.server(authority.certify("datacenter"))
    context.load_verify_locations(authority.path)
    context.verify_mode = ssl.CERT_REQUIRED
    own = authority.certify("edge")
    shows = ("--datacenter-certificate", str(own.certificate), "--datacenter-key", str(own.key))
    with running_peer(tls=context) as peer, beside(peer, "--datacenter-ca", str(authority.path), *shows) as (_, caller):
        wait_until(lambda: from_datacenter(caller))
