"""An agent of the package `rebuno`, with its webhook on a port of the loopback, beside the kernel of the tests."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import rebuno
import uvicorn

from .rebuno_kernel import RebunoKernel
from .rebuno_kernel_rules import Json

AGENT = "coder"
SECRET = "secret of the agent"


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an application; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
    server.config.load()
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def working(kernel: RebunoKernel, process: Callable[..., Any]) -> AsyncIterator[str]:
    """A worker that runs `process` for each dispatch; the address of its webhook, which becomes the agent's."""
    agent = rebuno.Agent(AGENT, secret=SECRET, base_url=kernel.url)
    agent.bind(process)
    async with serving(agent.app) as url:
        kernel.register(AGENT, SECRET, f"{url}/webhook")
        yield f"{url}/webhook"
        await agent.join()


async def ended(kernel: RebunoKernel, execution_id: str, *statuses: str) -> Json:
    """The execution, once it has ended or has one of the statuses; the loop goes on meanwhile."""
    return await asyncio.to_thread(kernel.wait, execution_id, *statuses)


async def run(kernel: RebunoKernel, process: Callable[..., Any], given: Any = None, **options: Any) -> str:
    """Run an execution to its end by a worker of its own; its id. One that fails is an error."""
    async with working(kernel, process):
        execution_id = kernel.create(AGENT, given, **options)
        done = await ended(kernel, execution_id)
    assert done["status"] == "completed", done["failure_reason"]
    return execution_id


async def run_fork(kernel: RebunoKernel, process: Callable[..., Any], source: str, at_seq: int | None = None) -> Json:
    """Fork an execution and run the fork to its end by a worker of its own."""
    async with working(kernel, process):
        return await ended(kernel, kernel.fork(source, at_seq))
