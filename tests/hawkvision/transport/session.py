"""One session of the transport in memory, and a peer in it that seals whatever it likes."""

from __future__ import annotations

from typing import Any

from hawkvision.transport.client.sender import Sender
from hawkvision.transport.coding.image_coding import Coded, opaque
from hawkvision.transport.endpoint.channel import Channel
from hawkvision.transport.protocol.frames import Fragment, Frame, decode, encode
from hawkvision.transport.protocol.packet_protection import Header, Opener, Sealer, Secret, peek
from hawkvision.transport.server.assembly import Budget
from hawkvision.transport.server.receiver import Receiver

SESSION = 0xC0FFEE
CLIENT = Secret(bytes(range(16)), bytes(range(12)))
SERVER = Secret(bytes(range(16, 32)), bytes(range(12, 24)))
BEGIN = 1000.0
PLENTY = 1 << 30


class Peer:
    """The other end, in a test's hands: authentic datagrams of any frames, and what comes back, opened."""

    def __init__(self, sending: Secret = CLIENT, receiving: Secret = SERVER) -> None:
        self._sealer = Sealer(SESSION, sending)
        self._opener = Opener(receiving)
        self._next = dict.fromkeys(range(4), 0)

    def seal(self, *frames: Frame, path: int = 0) -> tuple[Header, bytes]:
        """A datagram of frames, as the arguments of `receive`."""
        return self.seal_bytes(b"".join(encode(frame) for frame in frames), path=path)

    def seal_bytes(self, payload: bytes, path: int = 0, skip: int = 0) -> tuple[Header, bytes]:
        """A datagram of any bytes, `skip` sequences further on."""
        self._next[path] += skip
        datagram = self._sealer.seal(path, self._next[path], payload)
        self._next[path] += 1
        return peek(datagram), datagram

    def open(self, datagrams: list[tuple[int, bytes]]) -> list[Frame]:
        """The frames of datagrams that the other end has sent."""
        payloads = (self._opener.open(peek(datagram), datagram) for _, datagram in datagrams)
        return [frame for payload in payloads if isinstance(payload, bytes) for frame in decode(payload)]


def server(budget: Budget | None = None) -> Receiver:
    """The receiving end, with template 0 registered, and a client whose address has proven that it receives."""
    receiver = Receiver(Channel[Any](SESSION, SERVER, CLIENT), budget or Budget(PLENTY))
    receiver.channel.path(0, BEGIN, proven=True)
    receiver.register_template(0, b"quality=fast")
    return receiver


def client(paths: int = 1) -> Sender:
    """The sending end."""
    sender = Sender(Channel[Any](SESSION, CLIENT, SERVER))
    for number in range(paths):
        sender.channel.path(number, BEGIN, proven=True)
    return sender


def coded(k: int = 4, n: int = 6, size: int = 100) -> Coded:
    """An image of opaque symbols."""
    made = opaque(bytes(1 + n % 255 for n in range(size)) * k, (n - k) / k, size)
    assert made is not None
    assert (made.format.k, made.format.n) == (k, n)
    return made


def fragments(image: Coded, number: int = 0, left_ms: int = 0, meta: bytes = b"", template: int = 0) -> list[Fragment]:
    """All fragments of an image."""
    return [
        Fragment(number, template, image.format, index, left_ms, 0, meta, symbol)
        for index, symbol in enumerate(image.symbols)
    ]
