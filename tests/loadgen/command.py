"""`python -m loadgen …` as a real process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from typing import Protocol


class Served(Protocol):
    """What is served at an address."""

    url: str


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


def against(
    serving: AbstractAsyncContextManager[Served],
    *words: str,
    until: asyncio.Event | None = None,
    server_leaves: bool = False,
) -> tuple[int | None, str, str]:
    """Status, output and errors of the command. At `until` it is interrupted, or the server leaves."""

    async def scenario() -> tuple[int | None, str, str]:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(serving)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "loadgen", *words, "--url", server.url,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            saying = asyncio.ensure_future(process.communicate())
            if until is not None:
                await until.wait()
                if server_leaves:
                    await stack.aclose()
                else:
                    process.send_signal(signal.SIGINT)
            out, err = await saying
            return process.returncode, out.decode(), err.decode()

    return asyncio.run(scenario())
