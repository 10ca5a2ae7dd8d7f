"""Tools for agents over the Model Context Protocol: `mcp`."""

import secrets as random
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .options import SecretCommand, SecretEnv, SecretFile, Thread, Wait
from .runtime import Exit, Invocation, UsageError, check_wait, command

if TYPE_CHECKING:
    from snapcore.integrations.coding_tools_checkpoints import CheckpointReport
    from snapcore.model import Checkpoint

__all__ = ["mcp"]


EXAMPLES: Final = {
    "mcp": (
        "snapcore mcp --thread thread-1",
        "snapcore mcp --thread thread-1 --sandbox docker://my-container/workspace --coding",
        "snapcore mcp --thread thread-1 --sandbox ./workspace --allow-restore",
    )
}


@command
async def mcp(
    invocation: Invocation,
    *,
    thread: Thread,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", "-s", metavar="ADDRESS", help="The sandbox: a folder or another address.")
    ] = None,
    coding: Annotated[
        bool, typer.Option("--coding", help="Also give the tools that read, write and run commands in the sandbox.")
    ] = False,
    every: Annotated[int, typer.Option("--every", metavar="N", help="With --coding: a checkpoint after every N changes.")] = 5,
    allow_restore: Annotated[bool, typer.Option("--allow-restore", help="Also give the tool that restores.")] = False,
    fork_prefix: Annotated[
        str | None, typer.Option("--fork-prefix", metavar="TEXT", help="How the threads of forks begin; THREAD-fork- by default.")
    ] = None,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    secret_command: SecretCommand = None,
    wait: Wait = None,
) -> int:
    """Serve the checkpoints of one thread to an agent, as an MCP server over stdin and stdout."""
    if sandbox is None and (coding or allow_restore):
        raise UsageError("--coding and --allow-restore need a sandbox.", hint="Add --sandbox.")
    if every < 1:
        raise UsageError("--every is a number of changes, at least 1.")
    check_wait(wait)

    def fork_to(_: "Checkpoint | None" = None) -> str:
        prefix = f"{thread}-fork-" if fork_prefix is None else fork_prefix
        return prefix + random.token_hex(4)

    import snapcore
    from snapcore.integrations.agent_tools import AgentTools
    from snapcore.integrations.coding_tools import CodingTools
    from snapcore.integrations.mcp_server import serve_stdio
    from snapcore.integrations.tool_schemas import Toolset
    from snapcore.model import validate_thread_id

    def tell(report: "CheckpointReport") -> None:
        if not invocation.quiet:
            sys.stderr.write(f"checkpoint {report.outcome}: {report.checkpoint_id or report.message}\n")

    if fork_prefix is not None:
        validate_thread_id(fork_to())  # now, and not when the agent forks
    hidden = invocation.secrets(secret_env, secret_file, secret_command)
    how: dict[str, Any] = {"wait": wait, "policy": invocation.policy()}
    async with AsyncExitStack() as opened:
        repo = await opened.enter_async_context(invocation.repository())
        handle: Any = None
        if sandbox is not None:
            handle = await snapcore.connect(sandbox)
            if hasattr(handle, "close"):
                opened.push_async_callback(handle.close)
        agent = AgentTools(
            repo,
            thread,
            handle,
            fork_to=fork_to,
            allow_restore=allow_restore,
            capture=how,
            show_forks=True,
            secrets=hidden,
        )
        toolsets: list[Toolset] = [agent]
        if coding:
            tools = CodingTools(handle, repo, thread_id=thread, every=every, capture=how, on_checkpoint=tell, secrets=hidden)
            toolsets.append(await opened.enter_async_context(tools))
        if sys.stdin.isatty() and not invocation.quiet:
            sys.stderr.write("waiting for an MCP client on stdin; mostly the client starts this command. Ctrl-D ends it.\n")
        await serve_stdio(toolsets)
    return Exit.DONE
