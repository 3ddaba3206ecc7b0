"""TLS of a real node: who may speak to it, certificates renewed under open connections, callers who mean no good."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import select
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.client.blocking import Client
from hawkvision.core.errors import ConfigError, ServiceError
from hawkvision.servers.tls import Certificates
from hawkvision.system.child_server import ServerProcess, running
from tests.authority import Authority, Pair, replace
from tests.fuzz.examples import SHARED_FIXTURE, examples
from tests.hawkvision.servers.raw_http import GET, until_closed
from tests.images import encoded
from tests.waiting import wait_until

FILES = 144
"""Leaves 16 connections."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.certify("node")


@pytest.fixture(scope="module")
def node(pair: Pair) -> Iterator[ServerProcess]:
    with serving(pair) as node:
        yield node


def serving(
    pair: Pair, *arguments: str, module: str = "edge", first: tuple[str, ...] = ()
) -> AbstractContextManager[ServerProcess]:
    given = ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key))
    return running(module, *first, "--port", "0", "--backend", "noop", *given, *arguments)


def caller(node: ServerProcess, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", node.port, timeout=30, context=context)


def get(connection: http.client.HTTPConnection, path: str = "/healthz", **headers: str) -> http.client.HTTPResponse:
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    response.read()
    return response


def serial(node: ServerProcess, authority: Authority) -> str:
    """Of the certificate that a new connection sees."""
    with connected(node, authority.client()) as connection:
        return str((connection.getpeercert() or {})["serialNumber"])


def connected(node: ServerProcess, context: ssl.SSLContext) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", node.port), timeout=30)
    try:
        return context.wrap_socket(raw, server_hostname="127.0.0.1")
    except BaseException:
        raw.close()
        raise


# ------------------------------------------------------------------------------------------------ conversing


def test_a_node_answers_over_tls_and_says_so(node: ServerProcess, authority: Authority) -> None:
    assert node.url.startswith("https://")
    with closing(caller(node, authority.client())) as connection:
        for _ in range(2):  # on the same connection
            connection.request("POST", "/v1/classify?quality=fast", encoded())
            response = connection.getresponse()
            assert json.loads(response.read())["tier"] == "edge"


def test_a_body_that_comes_late_and_in_parts_is_answered_too(node: ServerProcess, authority: Authority) -> None:
    image = encoded(height=400, width=400)
    with connected(node, authority.client()) as connection:
        connection.sendall(b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(image))
        for start in range(0, len(image), 1000):
            connection.sendall(image[start : start + 1000])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_request_in_the_same_breath_as_the_handshake_is_answered(node: ServerProcess, authority: Authority) -> None:
    """With TLS 1.3 a caller may send at once what it has, before the server knows that the handshake is done."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = authority.client().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", node.port), timeout=30) as raw:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                incoming.write(raw.recv(65536))
        tls.write(GET * 3)
        raw.sendall(outgoing.read())  # Finished and three requests
        said = b""
        while said.count(b"200 OK") < 3:
            try:
                said += tls.read(65536)
            except ssl.SSLWantReadError:
                incoming.write(raw.recv(65536))


def test_http_1_1_is_agreed_upon(node: ServerProcess, authority: Authority) -> None:
    context = authority.client()
    context.set_alpn_protocols(["h2", "http/1.1"])
    with connected(node, context) as connection:
        assert connection.selected_alpn_protocol() == "http/1.1"


def test_a_refusal_is_read_before_the_connection_ends(node: ServerProcess, authority: Authority) -> None:
    with connected(node, authority.client()) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000)
        said = b""
        while piece := connection.recv(65536):
            said += piece
    assert said.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in said


# ------------------------------------------------------------------------------------------ versions, certificates


@pytest.fixture(scope="module")
def strict(authority: Authority, pair: Pair) -> Iterator[ServerProcess]:
    """Of callers it wants TLS 1.3 and a certificate."""
    asks = ("--tls-minimum-version", "1.3", "--tls-client-ca", str(authority.path))
    with serving(pair, *asks) as node:
        yield node


def of_version(context: ssl.SSLContext, version: ssl.TLSVersion) -> ssl.SSLContext:
    context.set_ciphers("ALL:@SECLEVEL=0")  # or this end would refuse old versions itself
    context.minimum_version = context.maximum_version = version
    return context


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_versions_older_than_1_2_are_refused(node: ServerProcess, authority: Authority) -> None:
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version|unsupported.protocol"):
        connected(node, of_version(authority.client(), ssl.TLSVersion.TLSv1_1))
    with connected(node, of_version(authority.client(), ssl.TLSVersion.TLSv1_2)) as connection:
        assert connection.version() == "TLSv1.2"


def test_a_newer_minimum_is_kept(strict: ServerProcess, authority: Authority) -> None:
    own = authority.certify("modern-camera")
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
        connected(strict, of_version(authority.client(own), ssl.TLSVersion.TLSv1_2))
    with closing(caller(strict, authority.client(own))) as connection:
        assert get(connection).status == 200


def test_callers_need_a_certificate_where_one_is_asked_for(
    strict: ServerProcess, authority: Authority, tmp_path: Path
) -> None:
    for own, why in (
        (None, "certificate.required"),
        (Authority(tmp_path, "a stranger").certify("stranger"), "unknown.ca"),
        (authority.certify("expired-camera", days=-1), "certificate.expired"),
    ):
        # With TLS 1.3 a caller hears of it when it reads.
        with connected(strict, authority.client(own)) as refused, pytest.raises(ssl.SSLError, match=f"(?i){why}"):
            refused.recv(1)
    own = authority.certify("camera")
    with Client(strict.url, ca=authority.path, certificate=own.certificate, certificate_key=own.key) as client:
        assert client.health().ready
    both = tmp_path / "both.pem"
    both.write_bytes(own.certificate.read_bytes() + own.key.read_bytes())
    with Client(strict.url, ca=authority.path, certificate=both) as client:
        assert client.health().ready


def broken(authority: Authority, folder: Path, how: str) -> Pair:
    good, other = authority.certify(f"good-{how}"), authority.certify(f"other-{how}")
    wrong = Pair(folder / "wrong.crt", folder / "wrong.key")
    wrong.certificate.write_bytes(good.certificate.read_bytes())
    wrong.key.write_bytes(good.key.read_bytes())
    match how:
        case "another's key":
            wrong.key.write_bytes(other.key.read_bytes())
        case "half a certificate":
            wrong.certificate.write_bytes(good.certificate.read_bytes()[:200])
        case "an empty key":
            wrong.key.write_bytes(b"")
        case "no key":
            wrong.key.unlink()
        case "no certificate":
            wrong.certificate.unlink()
        case "a folder":
            wrong.certificate.unlink()
            wrong.certificate.mkdir()
        case "an encrypted key":
            key = serialization.load_pem_private_key(good.key.read_bytes(), None)
            formats = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
            wrong.key.write_bytes(key.private_bytes(*formats, serialization.BestAvailableEncryption(b"word")))
    return wrong


BROKEN = {
    "another's key": r"edge\.tls_key: .*wrong\.key is not the key of the certificate in .*wrong\.crt",
    "half a certificate": r"edge\.tls_certificate: .*wrong\.crt: expected PEM certificates",
    "an empty key": r"edge\.tls_key: .*wrong\.key: expected an unencrypted PEM private key",
    "no key": r"edge\.tls_key: .*wrong\.key: No such file",
    "no certificate": r"edge\.tls_certificate: .*wrong\.crt: No such file",
    "a folder": r"edge\.tls_certificate: .*wrong\.crt: Is a directory",
    "an encrypted key": r"edge\.tls_key: .*wrong\.key: expected an unencrypted PEM private key: it is encrypted",
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_wrong_with_a_pair_is_said_with_its_setting(authority: Authority, tmp_path: Path, how: str) -> None:
    wrong = broken(authority, tmp_path, how)
    with pytest.raises(ConfigError, match=BROKEN[how]):
        Certificates("edge.tls_", wrong.certificate, wrong.key, server=True)


# ------------------------------------------------------------------------------------------------- renewing


@pytest.fixture
def renewed(authority: Authority, tmp_path: Path) -> Iterator[tuple[ServerProcess, Pair]]:
    """A node, and its files, which the test may change."""
    first = authority.certify("first")
    own = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    own.certificate.write_bytes(first.certificate.read_bytes())
    own.key.write_bytes(first.key.read_bytes())
    with serving(own) as node:
        yield node, own


def test_a_new_pair_is_taken_up_and_open_connections_stay(
    renewed: tuple[ServerProcess, Pair], authority: Authority
) -> None:
    node, own = renewed
    with closing(caller(node, authority.client())) as before:
        get(before)
        port = before.sock.getsockname()[1]
        first = serial(node, authority)
        own.become(authority.certify("second"))
        wait_until(lambda: serial(node, authority) != first)  # because the files changed
        second = serial(node, authority)
        own.become(authority.certify("third"))
        node.process.send_signal(signal.SIGHUP)
        wait_until(lambda: serial(node, authority) != second)
        assert get(before).status == 200
        assert before.sock.getsockname()[1] == port


def test_a_bad_pair_is_logged_and_the_old_one_kept(
    renewed: tuple[ServerProcess, Pair], authority: Authority, tmp_path: Path
) -> None:
    node, own = renewed
    first = serial(node, authority)
    replace(own.key, authority.certify("other").key.read_bytes())
    wait_until(lambda: "is not the key of the certificate" in node.output())
    assert "the previous files stay in use" in node.output()
    assert serial(node, authority) == first
    own.become(authority.certify("late", days=-1))
    wait_until(lambda: "tls.crt has expired on" in node.output())
    assert serial(node, authority) == first
    own.become(authority.certify("right"))
    wait_until(lambda: serial(node, authority) != first)


def test_a_caller_renews_its_trust_too(authority: Authority, tmp_path: Path) -> None:
    """`datacenter_ca` and the client's certificate of a node, whose HTTP client takes one context for ever."""
    other = Authority(tmp_path, "another authority")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(other.path.read_bytes())
    certificates = Certificates("edge.datacenter_", authorities=trusted, server=False)
    context = certificates.renewing()
    server = authority.server(authority.certify("peer"))

    def shakes() -> bool:
        ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            context.wrap_bio(ours, theirs, server_hostname="127.0.0.1"),
            server.wrap_bio(theirs, ours, server_side=True),
        )
        done: set[ssl.SSLObject] = set()
        for end in (*ends, *ends):
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                continue
        return ends[0] in done

    with pytest.raises(ssl.SSLCertVerificationError):
        shakes()
    replace(trusted, authority.path.read_bytes())
    certificates.reload()
    assert shakes()


# ------------------------------------------------------------------------------------------- those who mean no good


@pytest.fixture(scope="module")
def impatient(pair: Pair) -> Iterator[ServerProcess]:
    with running("tests.hawkvision.servers.impatient", "127.0.0.1", str(pair.certificate), str(pair.key)) as server:
        yield server


def hello() -> bytes:
    """What a caller says first."""
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="x").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_handshake_that_does_not_go_on_is_ended(impatient: ServerProcess, share: float) -> None:
    said = hello()
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=30) as slow:
        slow.sendall(said[: round(share * len(said))])
        until_closed(slow)  # else the socket's own time runs out


def test_a_handshake_that_drips_is_ended(impatient: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=30) as slow:
        assert ended_while_dripping(slow, hello() * 100)


def ended_while_dripping(connection: socket.socket, drips: bytes) -> bool:
    poll = select.poll()
    poll.register(connection, 0)  # errors are always reported
    with contextlib.suppress(ConnectionError):
        for byte in drips:
            connection.sendall(bytes([byte]))
            if poll.poll(20):
                return True
        return False
    return True


def test_no_head_after_the_handshake_is_ended_as_well(impatient: ServerProcess, authority: Authority) -> None:
    with connected(impatient, authority.client()) as silent:
        assert until_closed(silent) == b""


def test_callers_that_never_finish_their_handshake_keep_nobody_out(pair: Pair, authority: Authority) -> None:
    with serving(pair, module="tests.edge.limited", first=(str(FILES),)) as node, contextlib.ExitStack() as stack:
        for _ in range(100):  # as many would be open files of the node
            stack.enter_context(socket.create_connection(("127.0.0.1", node.port), timeout=30)).sendall(hello()[:50])
        with closing(caller(node, authority.client())) as connection:
            wait_until(lambda: answers(connection))


def answers(connection: http.client.HTTPConnection) -> bool:
    try:
        return get(connection).status == 200
    except OSError:
        connection.close()
        return False


@settings(max_examples=examples(150), deadline=None, suppress_health_check=SHARED_FIXTURE)
@given(begins=st.integers(0, 300), rest=st.binary(max_size=300))
def test_whatever_is_sent_in_place_of_a_handshake_harms_nobody(
    impatient: ServerProcess, authority: Authority, begins: int, rest: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=30) as connection:
        with contextlib.suppress(OSError):  # it may have been hung up on by then
            connection.sendall(hello()[:begins] + rest)
            connection.shutdown(socket.SHUT_WR)
        until_closed(connection)
    with connected(impatient, authority.client()) as good:
        good.sendall(GET)
        assert good.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_failed_handshakes_are_counted(node: ServerProcess, authority: Authority) -> None:
    def failures() -> float:
        with closing(caller(node, authority.client())) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        found = re.search(r"(?m)^hawkvision_tls_handshake_failures_total (\S+)$", text)
        assert found
        return float(found[1])

    before = failures()
    with socket.create_connection(("127.0.0.1", node.port), timeout=30) as plain:
        plain.sendall(GET)
        assert b"200" not in until_closed(plain)
    with Client(node.url) as stranger, pytest.raises(ServiceError, match="certificate"):
        stranger.health()
    assert failures() == before + 2


def test_a_node_stops_while_a_handshake_is_under_way(authority: Authority, pair: Pair) -> None:
    with serving(pair) as node, socket.create_connection(("127.0.0.1", node.port), timeout=30) as slow:
        slow.sendall(hello()[:20])
        with closing(caller(node, authority.client())) as connection:
            assert get(connection).status == 200
        assert node.stop() == 0
