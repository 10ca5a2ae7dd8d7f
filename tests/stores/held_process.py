"""Processes of the tests that stop inside a transaction until they are told to go on."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

__all__ = ["ENOUGH", "held", "release"]

ENOUGH = 120.0  # seconds after which a test has failed


@asynccontextmanager
async def held(script: str, url: str, hold: str, job: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of `script` that has come to where it stops."""
    pipe = asyncio.subprocess.PIPE
    arguments = (script, url, hold, msgspec.json.encode(job).decode())
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        assert (await asyncio.wait_for(process.stdout.readline(), ENOUGH)).strip() == b"inside"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def release(process: asyncio.subprocess.Process) -> str:
    """Let it go on to its end; what came out."""
    output, _ = await asyncio.wait_for(process.communicate(b"go\n"), ENOUGH)
    assert process.returncode == 0
    return output.decode().strip()
