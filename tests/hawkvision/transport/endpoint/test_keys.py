"""Who is let in for datagrams, and that a key is proved where it is known and told to nobody."""

from __future__ import annotations

import asyncio
import hmac
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hawkvision.core.errors import Unauthorized
from hawkvision.servers.keyfile import Scope, add_key, remove_key
from hawkvision.servers.keys import NOBODY_ASKED, Caller, Keys, prove
from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.client.pending_responses import ConnectionLost
from hawkvision.transport.protocol.control import CloseCode, Hello
from hawkvision.transport.protocol.exporter import KEY_PROOF
from hawkvision.transport.protocol.server_certificate import own_identity
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.session import Incoming
from tests.hawkvision.transport.peers import IDENTITY, LOOPBACK, connected, serving
from tests.hawkvision.transport.session import coded

KEY = "a-key-of-some-length"
IMAGE = coded(k=4, n=6)


class Saying(ClientConnection):
    """A client that says a hello of the test's choice."""

    hello: Hello

    def on_secured(self) -> None:
        assert self._protocol is not None
        self._protocol.send_message(self.hello)


async def answer_to(port: int, hello: Hello) -> str:
    """Why a server ends the connection after this hello; empty if it welcomes."""
    client = Saying()
    client.hello = hello
    try:
        await asyncio.wait_for(client._open(port, IDENTITY.pem, IDENTITY.name, [LOOPBACK], None), 10.0)
    except ConnectionLost as error:
        return str(error)
    finally:
        await client.close()
    return ""


@pytest.mark.parametrize("given", [None, "", "wrong", KEY + "x", KEY[:-1]])
def test_a_wrong_key_is_unauthorized(given: str | None) -> None:
    async def scenario() -> None:
        async with serving(keys=Keys(KEY)) as server:
            with pytest.raises(Unauthorized, match="API key"):
                async with connected(server.port, api_key=given):
                    pass
            assert not server.sessions
            assert server.keys.counts()["unknown", "unauthorized"] == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("given", [KEY, KEY + "\n", KEY + " \r\n"])
def test_the_right_key_lets_in_whatever_ends_its_line(given: str) -> None:
    async def scenario() -> None:
        async with serving(keys=Keys(KEY)) as server, connected(server.port, api_key=given) as client:
            assert await client.ask(b"cats", IMAGE) == (Status.OK, b"cats ")

    asyncio.run(scenario())


def test_a_key_is_no_hindrance_where_none_is_asked_for() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.port, api_key=KEY) as client:
            assert (await client.ask(b"cats", IMAGE))[0] is Status.OK

    asyncio.run(scenario())


def test_each_key_of_a_file_is_known_by_its_name_and_one_that_may_not_infer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    camera, monitor = add_key(file, "camera", [Scope.INFER]), add_key(file, "monitor", [Scope.OBSERVE])
    seen = list[Caller]()

    async def handler(incoming: Incoming) -> tuple[Status, bytes]:
        seen.append(incoming.caller)
        return Status.OK, b""

    async def scenario() -> None:
        async with serving(handler, keys=Keys(KEY, file)) as server:
            for key in (KEY, camera):
                async with connected(server.port, api_key=key) as client:
                    await client.ask(b"", IMAGE)
            with pytest.raises(Unauthorized, match="'monitor' lacks the scope 'infer'"):
                async with connected(server.port, api_key=monitor):
                    pass
            remove_key(file, "camera")
            server.keys.reload()
            with pytest.raises(Unauthorized, match="wrong API key"):
                async with connected(server.port, api_key=camera):
                    pass

    asyncio.run(scenario())
    assert [caller.name for caller in seen] == ["api_key", "camera"]


class Believing(Keys):
    """Of somebody in between, who lets everybody in and keeps what he was told."""

    def __init__(self) -> None:
        super().__init__("a-key-that-nobody-has")
        self.received = list[bytes]()

    def by_proof(self, proof: bytes, exporter: bytes) -> Caller:
        self.received.append(proof)
        return NOBODY_ASKED


def test_a_man_in_the_middle_learns_no_key_and_cannot_pass_the_proof_on() -> None:
    swapped = own_identity()
    between = Believing()

    async def scenario() -> tuple[bytes, str]:
        async with serving(keys=Keys(KEY)) as true, serving(identity=swapped, keys=between) as false:
            async with connected(false.port, certificate=swapped.pem, api_key=KEY):
                (proof,) = between.received
            refused = await answer_to(true.port, Hello(2, proof))
            assert not true.sessions
            return proof, refused

    proof, refused = asyncio.run(scenario())
    assert "API key" in refused
    assert KEY.encode() not in proof
    assert len(proof) == 96


def test_a_proof_is_of_its_own_connection_and_not_of_the_next() -> None:
    async def scenario() -> None:
        async with serving(keys=Keys(KEY)) as server, connected(server.port, api_key=KEY) as client:
            assert client._protocol is not None
            proof = prove(KEY, client._protocol.exporter.export(KEY_PROOF))
            (session,) = server.sessions.values()
            exporter = session._protocol.exporter.export(KEY_PROOF)
            caller = server.keys.by_proof(proof, exporter)
            assert caller is not None
            assert caller.name == "api_key"
            assert "API key" in await answer_to(server.port, Hello(2, proof))
            for broken in (proof[:-1], proof + b"x", bytes([proof[0] ^ 1]) + proof[1:], proof[:-1] + b"\0", b""):
                assert "API key" in await answer_to(server.port, Hello(2, broken))

    asyncio.run(scenario())


def test_a_proof_follows_the_specification() -> None:
    """By `WIRE.md` §4 alone."""

    async def scenario() -> bytes:
        async with serving(keys=Keys(KEY)) as server, connected(server.port, api_key=KEY) as client:
            assert client._protocol is not None
            value = client._protocol.exporter.export(b"EXPORTER-hawkvision-key-proof", b"", 32)
            pair = Ed25519PrivateKey.from_private_bytes(
                hmac.digest(b"hawkvision datagram proof 1", KEY.encode(), "sha256")
            )
            proof = pair.public_key().public_bytes_raw() + pair.sign(b"hawkvision datagram proof 1\0" + value)
            assert proof == prove(KEY, client._protocol.exporter.export(KEY_PROOF))
            return proof

    assert len(asyncio.run(scenario())) == 96


def test_a_client_of_another_version_is_refused_with_the_version_that_is_spoken() -> None:
    async def scenario() -> list[str]:
        async with serving() as server, serving(keys=Keys(KEY)) as keyed:
            return [await answer_to(port, Hello(version)) for version in (1, 3) for port in (server.port, keyed.port)]

    for place, refused in enumerate(asyncio.run(scenario())):
        assert f"speaks version 2, not {(1, 3)[place // 2]}" in refused


def test_a_long_first_message_is_refused_before_it_is_held() -> None:
    async def scenario() -> str:
        async with serving(keys=Keys(KEY)) as server:
            return await answer_to(server.port, Hello(2, b"k" * 5000))

    assert "at most 4096 here" in asyncio.run(scenario())


def test_close_codes_are_those_of_the_specification() -> None:
    assert (CloseCode.UNAUTHORIZED, CloseCode.VERSION, CloseCode.UNTRUSTED) == (2, 3, 7)
