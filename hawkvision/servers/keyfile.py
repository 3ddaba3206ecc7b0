"""The key file of a server. For each key it has a name, scopes, an optional rate, and digests, but not the key.

    # hawkvision keys, format 1: `hawkvision keys add|list|remove` edits this file.
    [keys.camera-7]
    sha256 = "9f86d0818…"        # SHA-256 of the key, hexadecimal: identifies HTTP callers
    proof_key = "d75a98018…"     # an Ed25519 public key, derived from the key: checks proofs of datagram callers
    scopes = ["infer", "observe"]
    rate = 50.0                  # requests per second; optional

Keys are random (256 bits), so a plain hash cannot be reversed by guessing and needs neither salt nor stretching. A
stolen file does not let anyone call the server: the private key for proofs is derived from the key, which only the
caller has.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from hawkvision.core.errors import ConfigError

KEY_PREFIX: Final = "hv_"
"""Lets secret scanners recognise a leaked key."""
KEY_BYTES: Final = 32
MAX_KEYS: Final = 4096
"""Also bounds the number of metric series per key."""
MAX_FILE_BYTES: Final = 2 * 1024 * 1024
"""`MAX_KEYS` entries are 1.2 MB."""
SINGLE: Final = "api_key"
"""The name of the key from the setting `api_key`."""
ANYBODY: Final = "anybody"
"""The name of callers of a server that requires no key."""
UNKNOWN: Final = "unknown"
"""The name of callers without a valid key."""
RESERVED: Final = frozenset({SINGLE, ANYBODY, UNKNOWN})
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HEAD: Final = (
    "# hawkvision keys, format 1: `hawkvision keys add|list|remove` edits this file. It holds no key itself.\n"
)
_DERIVATION: Final = b"hawkvision datagram proof 1"


class Scope(StrEnum):
    """Permissions of a key."""

    INFER = "infer"
    OBSERVE = "observe"
    OPERATE = "operate"
    REVIEW = "review"
    """To see callers' images that are kept, and to label them."""


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key as a server stores it."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Of the key, in hexadecimal."""
    proof_key: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """The Ed25519 public key that checks proofs, in hexadecimal."""
    scopes: Annotated[frozenset[Scope], Meta(min_length=1, max_length=len(Scope))]
    rate: Annotated[float, Meta(gt=0.0, le=1e6)] | None = None
    """Requests per second; None for no limit."""


Entries: TypeAlias = dict[str, KeyEntry]
"""Keys by name."""


def entry_of(key: str, scopes: Iterable[Scope], rate: float | None = None) -> KeyEntry:
    """The stored form of a key."""
    public = signing_key(key).public_key().public_bytes_raw()
    return KeyEntry(digest_of(key.encode()), public.hex(), frozenset(scopes), rate)


def digest_of(key: bytes) -> str:
    """The SHA-256 that identifies an HTTP caller, in hexadecimal."""
    return hashlib.sha256(key).hexdigest()


def signing_key(key: str) -> Ed25519PrivateKey:
    """The private key for proofs, derived from the key. The stored hash does not reveal it."""
    return Ed25519PrivateKey.from_private_bytes(hmac.digest(_DERIVATION, key.encode(), "sha256"))


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[Entries, Meta(max_length=MAX_KEYS)] = {}


def read_keys(path: Path) -> Entries:
    """The keys of a file.

    Raises:
        ConfigError: if it cannot be read, or is not as the module says; names file and place.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: a file of keys has at most {MAX_FILE_BYTES} bytes")
        stored = msgspec.convert(tomllib.loads(text.decode("utf-8-sig")), _File)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"{path}: cannot read the keys: {why}; `hawkvision keys add NAME --file {path}` begins a file"
        ) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
    names: dict[str, str] = {}
    for name, entry in sorted(stored.keys.items()):
        checked_name(name, f"{path}: keys.{name}"[:200])
        other = names.setdefault(entry.sha256, name)
        if other != name:
            raise ConfigError(f"{path}: keys.{name} and keys.{other} are the same key; remove one of them")
    return dict(sorted(stored.keys.items()))


def checked_name(name: str, where: str) -> str:
    """The name, if a key can have it: it appears in logs, metrics and TOML.

    Raises:
        ConfigError: if not.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: expected a name of 1 to 64 letters, digits, '-' and '_', got {name[:80]!r}")
    if name in RESERVED:
        raise ConfigError(f"{where}: {name!r} means something else; choose another name")
    return name


def add_key(path: Path, name: str, scopes: Iterable[Scope], rate: float | None = None) -> str:
    """Make a key, note it in the file, which is begun if need be, and return it: it can be read nowhere else.

    Raises:
        ConfigError: for a name that is taken or none, no scope, or a file that cannot be read or written.
    """
    checked_name(name, "name")
    scopes = frozenset(scopes)
    if not scopes:
        raise ConfigError(f"scope: expected at least one of {', '.join(Scope)}")
    if rate is not None and not 0.0 < rate <= 1e6:
        raise ConfigError(f"rate: expected more than 0 and at most 1,000,000 requests a second, got {rate:g}")
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)

    def added(entries: Entries) -> Entries:
        if name in entries:
            raise ConfigError(f"{path}: there is a key {name!r} already; remove it first, or choose another name")
        if len(entries) >= MAX_KEYS:
            raise ConfigError(f"{path}: there are {MAX_KEYS} keys already")
        return {**entries, name: entry_of(key, scopes, rate)}

    _edit(path, added, may_begin=True)
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove a key. Servers that watch the file refuse it from then on.

    Raises:
        ConfigError: if there is none of that name, or the file cannot be read or written.
    """

    def without(entries: Entries) -> Entries:
        if name not in entries:
            raise ConfigError(f"{path}: there is no key {name[:80]!r}; `hawkvision keys list` shows those there are")
        return {other: entry for other, entry in entries.items() if other != name}

    _edit(path, without, may_begin=False)


def _edit(path: Path, change: Callable[[Entries], Entries], *, may_begin: bool) -> None:
    """Replace the file atomically by a changed one. Concurrent commands wait for each other."""
    try:
        with _alone_in(path.parent):
            begun = path.exists()
            entries = read_keys(path) if begun or not may_begin else {}
            _replace(path, _text(change(entries)), like=path if begun else None)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the keys: {error.strerror or error}") from None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, text: str, *, like: Path | None) -> None:
    """Write a new file with mode 0600, or replace one and keep its owner and mode."""
    path = path.resolve()
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if like is not None:
                kept = like.stat()
                now = os.fstat(file.fileno())
                if (kept.st_uid, kept.st_gid) != (now.st_uid, now.st_gid):
                    os.fchown(file.fileno(), kept.st_uid, kept.st_gid)
                os.fchmod(file.fileno(), kept.st_mode & 0o777)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _text(entries: Entries) -> str:
    parts = [_HEAD]
    for name, entry in sorted(entries.items()):
        scopes = ", ".join(f'"{scope}"' for scope in Scope if scope in entry.scopes)
        parts.append(
            f'\n[keys.{name}]\nsha256 = "{entry.sha256}"\nproof_key = "{entry.proof_key}"\nscopes = [{scopes}]\n'
        )
        if entry.rate is not None:
            parts.append(f"rate = {float(entry.rate)!r}\n")
    return "".join(parts)
