"""An agent of the package `rebuno`, with its webhook on a port of the loopback, beside the kernel of the tests."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import rebuno
import uvicorn

from snapcore.integrations.rebuno import RebunoSandbox
from snapcore.repository import Repository

from .rebuno_kernel import RebunoKernel
from .rebuno_kernel_rules import Json

AGENT = "coder"
SECRET = "secret of the agent"

Process = Callable[[int], Awaitable[list[str]]]


class Worker(NamedTuple):
    """An agent, and where it listens."""

    agent: rebuno.Agent
    url: str


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
async def working(kernel: RebunoKernel, process: Callable[..., Any]) -> AsyncIterator[Worker]:
    """A worker that runs `process` for each dispatch; the kernel delivers to the one that came last."""
    agent = rebuno.Agent(AGENT, secret=SECRET, base_url=kernel.url)
    agent.bind(process)
    async with serving(agent.app) as url:
        kernel.register(AGENT, SECRET, f"{url}/webhook")
        yield Worker(agent, f"{url}/webhook")
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


async def names(sandbox: RebunoSandbox) -> list[str]:
    """What lies in a sandbox."""
    result = await sandbox.exec("ls")
    return result.stdout.decode().split()


def writing(driver: Any, *, every_steps: int = 1, on_completion: bool = True) -> Process:
    """An agent that writes file1, file2, ... each in a step of its own, and says what lies in the sandbox then."""

    async def process(files: int) -> list[str]:
        policy = rebuno.CheckpointPolicy(every_steps, on_completion)
        sandbox = await rebuno.resource("workspace", driver=driver, checkpoints=policy)

        async def write(number: int) -> int:
            await sandbox.upload(f"{sandbox.workspace_root}/file{number}", b"%d" % number)
            return number

        for number in range(1, files + 1):
            await rebuno.step("write", write, {"number": number}, resources=["workspace"])
        return await names(sandbox)

    return process


def looking(driver: Any) -> Process:
    """An agent that only says what lies in the sandbox."""

    async def process(files: int) -> list[str]:
        return await names(await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy()))

    return process


async def kept(repo: Repository, reference: str) -> list[str]:
    """The files of the checkpoint that a reference names."""
    _, _, checkpoint_id, thread_id = reference.split("/", 3)
    checkpoint = await repo.get(thread_id, checkpoint_id)
    assert checkpoint is not None
    return [entry.path.decode() async for entry in repo.ls(checkpoint) if entry.path]
