"""The keys of a server: who calls, what each key allows and how often. HTTP and datagram servers share it.

    Authorization: Bearer KEY ── SHA-256 ──► by digest ──┐
                                                         ├──► Caller ──► scope ──► rate ──► the request's own work
    Hello: proof over the TLS exporter ──► by proof key ─┘     401       403       429

Keys are looked up by hash, so the time of a look-up reveals nothing about them. `Keys` belongs to one event loop. Rates
apply per process.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from hawkvision.core.errors import Forbidden, Overloaded, Unauthorized
from hawkvision.core.escalation_api import INFER_PATH, STAGES_PATH, TRANSPORT_PATH
from hawkvision.core.server_access import own_key
from hawkvision.servers.keyfile import (
    ANYBODY,
    SINGLE,
    UNKNOWN,
    KeyEntry,
    Scope,
    digest_of,
    entry_of,
    read_keys,
    signing_key,
)

log = logging.getLogger("hawkvision.keys")

Scopes: TypeAlias = frozenset[Scope]

ALL: Final = frozenset(Scope)
INFER: Final = frozenset({Scope.INFER})
OBSERVE: Final = frozenset({Scope.OBSERVE})
OPERATE: Final = frozenset({Scope.OPERATE})
REVIEW: Final = frozenset({Scope.REVIEW})
EITHER: Final = frozenset({Scope.INFER, Scope.OBSERVE})
"""For what clients read before they send images: addresses, the served models and their targets."""

PAGE_FILES: Final = ("style.css", "app.js", "common.js", "try.js", "live.js", "review.js", "texts.js", "icon.svg")
_DOCS: Final = ("page.css", "page.js", "swagger-ui.css", "swagger-ui-bundle.js")
OPEN_PATHS: Final = frozenset(
    {"/healthz", "/readyz", "/v1/status/ping", "/v2/health/live", "/v2/health/ready", TRANSPORT_PATH}
    | {"/docs", *(f"/docs/{name}" for name in _DOCS)}
    | {"/", *(f"/page/{name}" for name in PAGE_FILES)}
)
"""Paths without a key: whether the server is up, where it listens for datagrams, and the files of two pages that ask
for a key themselves: the node's, and that which shows `/openapi.json`. A client asks for the address over plain HTTP
and must not have to reveal its key there."""

# Method, path, and scopes; a key must have at least one of these. The first match counts, for both tiers.
_RULES: Final = tuple(
    (method, re.compile(path, re.DOTALL), needed)
    for method, path, needed in (
        ("POST", r"/v2/repository/index|/v1/vision/custom/list", EITHER),  # how these protocols list models
        ("POST", rf"/v1/(classify|detect|infer|vision/.+)|{re.escape(INFER_PATH)}|/v2/models/.+/infer", INFER),
        *((method, r"/v1/review(/.*)?", REVIEW) for method in ("GET", "HEAD", "POST", "DELETE")),
        *((method, r"/v1/status/answers/.*", REVIEW) for method in ("GET", "HEAD")),  # callers' images
        ("GET", "/v1/tasks", ALL),  # what each view of the page asks first
        ("GET", rf"{re.escape(STAGES_PATH)}|/v1/targets|/openapi[.]json|/v2(/.*)?", EITHER),
        ("GET", r".*", OBSERVE),  # /metrics, and what is not found
        ("HEAD", r".*", OBSERVE),
    )
)
"""Requests that match no row need `OPERATE`."""

_PROOF_BYTES: Final = 32 + 64
"""The public key and the signature (RFC 8032)."""
_PROOF_DOMAIN: Final = b"hawkvision datagram proof 1\0"


class RateExceeded(Overloaded):
    """The rate of a key is exceeded."""


def needed_scopes(method: str, path: str) -> Scopes:
    """The scopes for a request; its key must have at least one of them."""
    for known, pattern, needed in _RULES:
        if known == method and pattern.fullmatch(path):
            return needed
    return OPERATE


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a key."""

    name: str
    scopes: Scopes
    digest: str
    """SHA-256 of the key; empty if the server requires none."""


NOBODY_ASKED: Final = Caller(ANYBODY, ALL, "")
"""Every caller of a server that requires no key."""


class _Account:
    """A key and its counters."""

    __slots__ = ("accepted", "at", "caller", "entry", "forbidden", "limited", "tokens")

    def __init__(self, name: str, entry: KeyEntry, now: float) -> None:
        self.entry = entry
        self.caller = Caller(name, entry.scopes, entry.sha256)
        self.accepted = self.forbidden = self.limited = 0
        self.at = now
        self.tokens = self.burst

    @property
    def burst(self) -> float:
        """Requests that may follow at once after a pause: those of one second, at least one."""
        return max(1.0, self.entry.rate or 1.0)

    def wait_s(self, rate: float, now: float) -> float:
        """Take a token and return 0.0, or return the seconds until the next token (token bucket)."""
        self.tokens = min(self.burst, self.tokens + (now - self.at) * rate)
        self.at = now
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        return (1.0 - self.tokens) / rate

    def succeed(self, before: _Account) -> None:
        """Continue the counters of the account that had this name before a reload."""
        self.accepted, self.forbidden, self.limited = before.accepted, before.forbidden, before.limited
        self.at, self.tokens = before.at, min(self.burst, before.tokens)


class Keys:
    """The keys of one server. `Keys()` requires none."""

    def __init__(
        self,
        api_key: str | None = None,
        keys_file: Path | None = None,
        *,
        where: str = "api_key",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the keys.

        Args:
            api_key: one key with every scope.
            keys_file: see `hawkvision.servers.keyfile`; both may be given.
            where: name of the key's setting, for errors.
            clock: seconds, for rates.

        Raises:
            ConfigError: if the key is too short or the file cannot be read.
        """
        self.required = api_key is not None or keys_file is not None
        """Whether callers need a key."""
        self.file = keys_file
        self._clock = clock
        self._single = None if api_key is None else entry_of(own_key(api_key, where), ALL)
        self._by_digest: dict[str, _Account] = {}
        self._by_proof_key: dict[str, _Account] = {}
        self._unknown = self._anybody = 0
        self.reload()

    def reload(self) -> None:
        """Read the file again. Keys that are still there keep their counters.

        Raises:
            ConfigError: if it cannot be read; the keys then stay as they were.
        """
        entries = {} if self.file is None else read_keys(self.file)
        if self._single is not None:
            entries = {SINGLE: self._single, **entries}
        before = {account.caller.name: account for account in self._by_digest.values()}
        accounts = [_Account(name, entry, self._clock()) for name, entry in entries.items()]
        for account in accounts:
            if account.caller.name in before:
                account.succeed(before[account.caller.name])
        # If the single key is also in the file, the narrower scopes of the file apply.
        self._by_digest = {account.entry.sha256: account for account in accounts}
        self._by_proof_key = {account.entry.proof_key: account for account in accounts}
        if before and self.file is not None:
            new, gone = entries.keys() - before.keys(), before.keys() - entries.keys()
            log.info("keys read again: %d, %d new, %d gone", len(entries), len(new), len(gone))

    def identify(self, presented: bytes | None) -> Caller | None:
        """The caller with this key, without trailing white space; None if there is none."""
        if not self.required:
            return NOBODY_ASKED
        account = None if presented is None else self._by_digest.get(digest_of(presented.rstrip()))
        return None if account is None else account.caller

    def by_proof(self, proof: bytes, exporter: bytes) -> Caller | None:
        """The caller who made a proof (`prove`) over this exporter; None if the proof is not valid."""
        if not self.required:
            return NOBODY_ASKED
        if len(proof) != _PROOF_BYTES:
            return None
        account = self._by_proof_key.get(proof[:32].hex())
        if account is None:
            return None
        try:
            Ed25519PublicKey.from_public_bytes(proof[:32]).verify(proof[32:], _PROOF_DOMAIN + exporter)
        except (InvalidSignature, ValueError):
            return None
        return account.caller

    def refused(self) -> Unauthorized:
        """Count an unidentified caller. Returns the error to raise."""
        self._unknown += 1
        return Unauthorized(
            "missing or wrong key; expected one of this server's in the header 'Authorization: Bearer KEY'"
        )

    def admit(self, caller: Caller, needed: Scopes) -> None:
        """Admit a request of the caller, and count it.

        Raises:
            Unauthorized: if the key has been removed.
            Forbidden: if the key has none of the needed scopes.
            RateExceeded: if its rate is exceeded; says for how long.
        """
        if not self.required:
            self._anybody += 1
            return
        account = self._by_digest.get(caller.digest)
        if account is None:
            raise self.refused()
        entry = account.entry
        if not entry.scopes & needed:
            account.forbidden += 1
            has, wants = ", ".join(sorted(entry.scopes)), " or ".join(sorted(needed))
            raise Forbidden(f"the key {caller.name!r} may {has}; this needs a key that may {wants}")
        if entry.rate is not None and (wait_s := account.wait_s(entry.rate, self._clock())) > 0.0:
            account.limited += 1
            raise RateExceeded(f"the key {caller.name!r} has used up its {entry.rate:g} requests a second", wait_s)
        account.accepted += 1

    def authorize(self, authorization: str | None, needed: Scopes) -> Caller:
        """Identify the caller of an HTTP request, admit the request and count it.

        Args:
            authorization: the header's value, decoded as Latin-1.
            needed: see `needed_scopes`.

        Raises:
            Unauthorized, Forbidden, RateExceeded: as `admit`.
        """
        if not self.required:
            self._anybody += 1
            return NOBODY_ASKED
        caller = self.caller_of(authorization)
        if caller is None:
            raise self.refused()
        self.admit(caller, needed)
        return caller

    def caller_of(self, authorization: str | None) -> Caller | None:
        """The caller of an HTTP request, which is not counted; None for a missing or wrong key."""
        scheme, _, given = (authorization or "").partition(" ")
        presented = given.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else None
        return self.identify(presented)

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Requests by name of the key and outcome. Names are those of the keys, and two more."""
        found: Counter[tuple[str, str]] = Counter()
        if not self.required:
            found[ANYBODY, "accepted"] = self._anybody
            return found
        found[UNKNOWN, "unauthorized"] = self._unknown
        for account in self._by_digest.values():
            name = account.caller.name
            found[name, "accepted"] = account.accepted
            found[name, "forbidden"] = account.forbidden
            found[name, "rate_limited"] = account.limited
        return found


def prove(key: str, exporter: bytes) -> bytes:
    """A proof of the key, bound to one TLS connection by its exporter (RFC 5705): public key and signature.

    The proof does not help its receiver to make another one.
    """
    signer = signing_key(key)
    return signer.public_key().public_bytes_raw() + signer.sign(_PROOF_DOMAIN + exporter)
