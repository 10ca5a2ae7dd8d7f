"""Tools served to a client of the Model Context Protocol over this process's stdin and stdout.

The client starts the server, and its end is the end of stdin. Nothing but the protocol goes to stdout: whatever else would be
written there goes to stderr. The official package `mcp` speaks the protocol.
"""

import asyncio
import contextlib
import fcntl
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar, cast

from snapcore.engine import stop
from snapcore.errors import Code, SnapcoreError

from .tool_schemas import Tool, ToolResult, Toolset

if TYPE_CHECKING:
    from mcp.server import Server

__all__ = ["make_server", "serve_stdio"]

T = TypeVar("T")

INSTRUCTIONS = (
    "Checkpoints of the files of one workspace. Save one before a change that may go wrong, give it a label, and compare with it"
    " afterwards."
)


def make_server(toolsets: Sequence[Toolset]) -> "Server[Any]":
    """A server with the tools of all sets, to be run over any transport of the package `mcp`.

    Calls that may change something are done one after another. A call that is cancelled, by the client or because it went away,
    is cancelled once, and waited for until it has given up what it held. Raises `SnapcoreError` `MISSING_EXTRA`."""
    try:
        import anyio
        import mcp_types as types
        from mcp.server import Server
        from mcp.shared.exceptions import MCPError
    except ImportError as error:
        raise SnapcoreError(
            "The MCP server needs the package mcp, which is not installed.",
            code=Code.MISSING_EXTRA,
            hint="Install it: pip install 'snapcore[mcp]'.",
        ) from error

    offered = {tool.name: (tool, tools) for tools in toolsets for tool in tools.tools}
    one_at_a_time = asyncio.Lock()

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[described(tool) for tool, _ in offered.values()])

    def described(tool: Tool) -> types.Tool:
        hints = types.ToolAnnotations(read_only_hint=tool.read_only, open_world_hint=False)
        return types.Tool(name=tool.name, description=tool.description, input_schema=tool.schema(), annotations=hints)

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in offered:
            raise MCPError(types.INVALID_PARAMS, f"There is no tool {params.name[:100]!r}.")
        tool, tools = offered[params.name]
        # A task of its own: a cancelled scope would cancel it again and again while it gives up what it holds.
        task = asyncio.create_task(call(tool, tools, params.arguments))
        try:
            await asyncio.wait([task])
        finally:
            if not task.done():
                task.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([task])
                if not task.cancelled():
                    task.exception()  # it was seen
        result = task.result()
        content: list[types.ContentBlock] = [types.TextContent(type="text", text=result.content)]
        return types.CallToolResult(content=content, structured_content=result.value, is_error=result.is_error)

    async def call(tool: Tool, tools: Toolset, arguments: object) -> ToolResult:
        async with contextlib.nullcontext() if tool.read_only else one_at_a_time:
            return await tools.dispatch(tool.name, arguments)

    return Server(
        "snapcore",
        version=version("snapcore"),
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def serve_stdio(toolsets: Sequence[Toolset]) -> None:
    """Serve until the client closes stdin, or no longer reads stdout. Calls under way are cancelled then, and waited for; so they
    are when this is cancelled."""
    server = make_server(toolsets)
    with _lines_of_stdin() as lines:
        serving = asyncio.create_task(_serve(server, lines))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            # In a task of its own, because the package (2.3) can end with an error of its streams instead of the cancellation,
            # when a message comes at that moment.
            await stop([serving])
            raise


async def _serve(server: "Server[Any]", lines: "_Lines") -> None:
    from mcp.server.stdio import stdio_server

    try:
        async with stdio_server(stdin=cast("Any", lines)) as (read, write):
            await server.run(read, write, server.create_initialization_options())
    except* ConnectionError:  # nobody reads stdout any more
        pass


class _Lines:
    """The lines of a stream, each read by a thread that nobody has to wait for: the server can end although a client keeps the
    other end open and says nothing."""

    def __init__(self, readline: Callable[[], str]) -> None:
        self._readline = readline

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        line = await _in_daemon(self._readline)
        if not line:
            raise StopAsyncIteration
        return line


@contextlib.contextmanager
def _lines_of_stdin() -> Iterator[_Lines]:
    """The client's messages. Meanwhile stdin itself is empty for whatever this process starts."""
    try:
        own = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:  # stdin was closed by whoever started this process
        yield _Lines(sys.stdin.readline)
        return
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # never closed: a thread may still be reading, and its number must not become another file's
    stream = os.fdopen(own, encoding="utf-8", errors="replace", closefd=False)
    try:
        yield _Lines(stream.readline)
    finally:
        os.dup2(own, 0)


async def _in_daemon(work: Callable[[], T]) -> T:
    """The result of `work`, done on a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: OSError | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", result))

    def run() -> None:
        result: T | None = None
        failure: OSError | None = None
        try:
            result = work()
        except OSError as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="snapcore-stdin", daemon=True).start()
    return await done
