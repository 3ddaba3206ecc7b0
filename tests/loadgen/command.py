"""`python -m loadgen …` as a real process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator

from tests.loadgen.scripted import RecordedRequest, Scripted, reply, scripted


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "loadgen", *words], capture_output=True, text=True, timeout=60)


def unread(*words: str) -> subprocess.CompletedProcess[str]:
    """The command, with its output closed by the reader."""
    read, write = os.pipe()
    os.close(read)
    try:
        return subprocess.run(
            [sys.executable, "-m", "loadgen", *words], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(write)


@contextlib.asynccontextmanager
async def endless(*words: str) -> AsyncIterator[tuple[Scripted, asyncio.subprocess.Process]]:
    """A load test that goes on until it is killed, and the server that has had its first image."""
    first = asyncio.Event()

    async def say(asked: RecordedRequest) -> bytes:
        if asked.sends:
            first.set()
        return reply(b'{"index": 1}')

    async with scripted(say) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadgen", "run", "--url", server.url, "--arrivals", "constant:50",
            "--duration-s", "600", "--no-noise", *words,
        )  # fmt: skip
        await first.wait()
        yield server, process
