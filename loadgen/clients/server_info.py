"""What a server says about itself, for the record of a test.

A server of the Open Inference Protocol (Triton, MLServer, …) gives its name and version at /v2. A HawkVision node gives
its policy, its stages and whether its certificates are valid at /v1/targets.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

import aiohttp
import msgspec

from loadgen.clients.engine import ServerAddress

TIMEOUT_S: Final = 2.0
"""For both together: a server that does not say is tested all the same."""
MAX_BYTES: Final = 256 * 1024
LONGEST: Final = 60
"""Characters of a word that are kept."""


class _Metadata(msgspec.Struct):
    name: str
    version: str = ""


class _Stage(msgspec.Struct):
    variant: str


class _Targets(msgspec.Struct):
    policy: str
    edge: _Stage
    best: _Stage
    certificates_valid: bool


SaidT = TypeVar("SaidT")


async def identify(server: ServerAddress) -> str:
    """Such as `hawkvision 0.2.0, policy hawkvision, efficientnet_lite0_int8 before committee`; what is not said is
    left out, and of a server that says nothing it is empty.
    """
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        about, targets = await asyncio.gather(
            _said(session, f"{server.url.rstrip('/')}/v2", _Metadata),
            _said(session, f"{server.url.rstrip('/')}/v1/targets", _Targets),
        )
    words = []
    if about is not None:
        words.append(f"{about.name[:LONGEST]} {about.version[:LONGEST]}".strip())
    if targets is not None:
        words.append(f"policy {targets.policy[:LONGEST]}")
        words.append(f"{targets.edge.variant[:LONGEST]} before {targets.best.variant[:LONGEST]}")
        words += ["certificates not valid"] * (not targets.certificates_valid)
    return ", ".join(words)


async def _said(session: aiohttp.ClientSession, url: str, kind: type[SaidT]) -> SaidT | None:
    try:
        async with session.get(url) as response:
            if response.status != 200:
                return None
            payload = b""
            while len(payload) < MAX_BYTES and (piece := await response.content.read(MAX_BYTES - len(payload))):
                payload += piece
        return msgspec.json.decode(payload, type=kind)
    except (TimeoutError, OSError, aiohttp.ClientError, msgspec.DecodeError, UnicodeDecodeError):
        return None
