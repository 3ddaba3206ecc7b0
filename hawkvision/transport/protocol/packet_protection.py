"""Sealing: datagrams beside QUIC are encrypted and authenticated by AES-128-GCM, under keys that travelled inside QUIC.

    0        1                5        6                        12
    +--------+----------------+--------+------------------------+----------------------+----------+
    | 0x11   | session (u32)  | path   | sequence (u48)         | sealed frames        | tag (16) |
    +--------+----------------+--------+------------------------+----------------------+----------+
    \\________ header, authenticated ___________________________/

The nonce is the direction's 12-byte IV xor (path, sequence) right-aligned, as RFC 9001 §5.3 makes its own, so a key
never sees a nonce twice: sequences only grow, on each path by itself. After 2^23 datagrams, the confidentiality limit
that RFC 9001 §6.6 gives AES-GCM, a key is exhausted and the session ends.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hawkvision.transport.protocol.wire import HEADER_BYTES, MAX_DATAGRAM, TAG_BYTES, Drop, WireError

FIRST_BYTE: Final = 0x11
"""Version 1. QUIC's fixed bit (0x40) is clear, which tells the two apart on one socket (RFC 9443)."""
MAX_SEALED: Final = 1 << 23
"""Datagrams under one key."""
SPARE_SEALED: Final = 1 << 15
"""Left when a key counts as worn out: more than 64 images of 255 fragments, which one poll may seal at most."""
REPLAY_WINDOW: Final = 1024
"""Sequences behind the largest that are still taken: 10 ms at 100,000 datagrams a second, 0.3 s at 3,000."""
SECRET_BYTES: Final = 28
MAX_PATHS: Final = 4
"""Pairs of addresses of one session."""

_HEADER: Final = struct.Struct("!BIBHI")


@dataclass(frozen=True, slots=True)
class Secret:
    """One direction's key (16 bytes) and IV (12 bytes)."""

    key: bytes
    iv: bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> Secret:
        """Both, as they travel.

        Raises:
            WireError: if there are not `SECRET_BYTES`.
        """
        if len(data) != SECRET_BYTES:
            raise WireError(f"a secret has {SECRET_BYTES} bytes; got {len(data)}")
        return cls(data[:16], data[16:])

    @classmethod
    def random(cls) -> Secret:
        """A fresh one."""
        return cls.from_bytes(os.urandom(SECRET_BYTES))


@dataclass(frozen=True, slots=True)
class Header:
    """What is readable of a sealed datagram; not to be believed before it was opened."""

    session: int
    path: int
    sequence: int


def is_sealed(datagram: bytes) -> bool:
    """Whether a datagram is ours rather than QUIC's."""
    return len(datagram) > 0 and datagram[0] == FIRST_BYTE


def peek(datagram: bytes) -> Header:
    """The header.

    Raises:
        WireError: if the datagram is too short, too long, or of another version.
    """
    if not HEADER_BYTES + TAG_BYTES < len(datagram) <= MAX_DATAGRAM:
        raise WireError(f"a sealed datagram has {HEADER_BYTES + TAG_BYTES + 1} to {MAX_DATAGRAM} bytes")
    first, session, path, high, low = _HEADER.unpack_from(datagram)
    if first != FIRST_BYTE:
        raise WireError(f"first byte {first:#04x}; expected {FIRST_BYTE:#04x}")
    if path >= MAX_PATHS:
        raise WireError(f"path {path}; a session has at most {MAX_PATHS}")
    return Header(session, path, high << 32 | low)


class Sealer:
    """One direction of a session, at its sending end."""

    def __init__(self, session: int, secret: Secret) -> None:
        self._session = session
        self._cipher = AESGCM(secret.key)
        self._iv = int.from_bytes(secret.iv)
        self.sealed = 0

    @property
    def key_exhausted(self) -> bool:
        """Whether the session must end now, before the key has protected as many datagrams as it may."""
        return self.sealed >= MAX_SEALED - SPARE_SEALED

    def seal(self, path: int, sequence: int, frames: bytes) -> bytes:
        """A datagram of these frames."""
        assert self.sealed < MAX_SEALED, "the session ends before its key is worn out"
        self.sealed += 1
        header = _HEADER.pack(FIRST_BYTE, self._session, path, sequence >> 32, sequence & 0xFFFFFFFF)
        nonce = (self._iv ^ (path << 48 | sequence)).to_bytes(12)
        return header + self._cipher.encrypt(nonce, frames, header)


class Opener:
    """One direction of a session, at its receiving end: opens what is authentic and not yet seen."""

    def __init__(self, secret: Secret) -> None:
        self._cipher = AESGCM(secret.key)
        self._iv = int.from_bytes(secret.iv)
        self._windows: dict[int, ReplayWindow] = {}

    def open(self, header: Header, datagram: bytes) -> bytes | Drop:
        """The frames; or why there are none: it was forged, damaged, replayed, or comes too late."""
        window = self._windows.get(header.path)
        if window is not None and not window.fresh(header.sequence):
            return Drop.REPLAYED
        nonce = (self._iv ^ (header.path << 48 | header.sequence)).to_bytes(12)
        try:
            frames = self._cipher.decrypt(nonce, datagram[HEADER_BYTES:], datagram[:HEADER_BYTES])
        except InvalidTag:
            return Drop.BAD_SEAL
        if window is None:  # at most `MAX_PATHS` of them
            window = self._windows[header.path] = ReplayWindow()
        window.add(header.sequence)
        return frames


class ReplayWindow:
    """Which of the last `REPLAY_WINDOW` sequences were seen, as RFC 4303 §3.4.3 keeps it."""

    def __init__(self) -> None:
        self._largest = -1
        self._seen = 0  # bit i: sequence `_largest - i`

    def fresh(self, sequence: int) -> bool:
        """Whether this sequence is new, and not too old to tell."""
        behind = self._largest - sequence
        return behind < 0 or (behind < REPLAY_WINDOW and not self._seen >> behind & 1)

    def add(self, sequence: int) -> None:
        """Remember it."""
        ahead = sequence - self._largest
        if ahead > 0:
            self._seen = (self._seen << min(ahead, REPLAY_WINDOW) | 1) & ((1 << REPLAY_WINDOW) - 1)
            self._largest = sequence
        else:
            self._seen |= 1 << -ahead
