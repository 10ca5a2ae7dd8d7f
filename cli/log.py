"""`snapcore log`: the ledger of a thread, what was done in its sandboxes."""

import asyncio
import base64
import select
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from snapcore.addresses import shown_address
from snapcore.errors import Code, SnapshotError, printable

from .output import columns, moment, print_json, print_line, width
from .runtime import Exit, Invocation, UsageError, command

if TYPE_CHECKING:
    from snapcore.ledger import Event, Operation
    from snapcore.repository import Repository

__all__ = ["EventLines", "log"]

EXAMPLES: Final = {
    "log": (
        "snapcore log thread-1",
        "snapcore log thread-1 --follow",
        "# what the command of that event wrote",
        "snapcore log thread-1 --output 3",
    )
}

PAGE: Final = 500
LAST: Final = 2**63 - 1  # the greatest number that an event could have
POLL_SECONDS: Final = 0.5
INDENT: Final = " " * 10  # of what an event was about, where that has a line of its own
SHELL: Final = ("sh", "-c")


@command
async def log(
    invocation: Invocation,
    *,
    thread: Annotated[str, typer.Argument(metavar="THREAD", help="The thread.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is done from now on, until interrupted.")
    ] = False,
    output: Annotated[
        int | None, typer.Option("--output", metavar="SEQUENCE", help="Print what the command of this event wrote, as it is.")
    ] = None,
) -> int:
    """Show what was done in a thread's sandboxes, oldest first."""
    if follow and output is not None:
        raise UsageError("--follow and --output exclude each other.")
    async with invocation.repository() as repo:
        if output is not None:
            await _print_output(invocation, repo, thread, output)
            return Exit.DONE
        lines, told = EventLines(), False
        async for event in _events(repo, thread, follow=follow):
            if invocation.json:
                print_json(lines.fields(event))
            elif invocation.tells:
                _tell(lines.parts(event))
                told = True
        if not told and invocation.tells and not invocation.json:
            print_line(f"Nothing was recorded for thread {thread}: sessions and 'snapcore exec' record what they do.")
    return Exit.DONE


async def _events(repo: "Repository", thread: str, *, after: int = 0, follow: bool = False) -> "AsyncIterator[Event]":
    while True:
        page = await repo.checkpoints.events(thread, after=after, limit=PAGE)
        for event in page:
            yield event
            after = event.sequence
        if len(page) == PAGE:
            continue
        if not follow:
            return
        sys.stdout.flush()
        _check_reader()
        await asyncio.sleep(POLL_SECONDS)


def _check_reader() -> None:
    """Raise `BrokenPipeError` once nobody reads any more. A thread at rest would never come to a write that finds out."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are told without being asked for
    if any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0)):  # the one on Linux, the other on macOS
        raise BrokenPipeError


class EventLines:
    """Events as lines and as JSON, given in order. Remembers when commands began, until they end."""

    def __init__(self) -> None:
        self._began: dict[str, Event] = {}

    def parts(self, event: "Event") -> tuple[str, ...]:
        """Time, sequence, kind, exit code, duration, step, and what it was about; padded, to stand below each other."""
        seconds = self._seconds(event)
        return (
            moment(event.at),
            f"{event.sequence:>6}",
            f"{event.kind:<27}",
            f"{_exit(event):<8}",
            f"{'' if seconds is None else f'{seconds:.2f}s':>9}",
            f"{'' if event.step is None else f'step {event.step}':<9}",
            _about(event),
        )

    def fields(self, event: "Event") -> dict[str, Any]:
        """The event as JSON has it."""
        return {
            "message_type": "event",
            "thread_id": event.thread_id,
            "sequence": event.sequence,
            "id": event.id,
            "at": moment(event.at, exact=True),
            "kind": event.kind,
            "sandbox_id": shown_address(event.sandbox_id),
            "step": event.step,
            "operation": _operation_fields(event.operation),
            "outside": event.outside,
            "at_most_once": event.at_most_once,
            "started_id": event.started_id,
            "reruns": event.reruns,
            "exit_code": event.exit_code,
            "seconds": self._seconds(event),
            "stdout_bytes": event.stdout.size,
            "stderr_bytes": event.stderr.size,
            "truncated": event.truncated,
            "error": event.error,
            "checkpoint_id": event.checkpoint_id,
            "automatic": event.automatic,
            "snapshot": event.snapshot,
            "destroyed": event.destroyed,
        }

    def _seconds(self, event: "Event") -> float | None:
        """How long a command took that ended with this event."""
        if event.kind == "exec.started":
            self._began[event.id] = event
        began = self._began.pop(event.started_id, None) if event.started_id is not None else None
        return None if began is None else (event.at - began.at) / 1_000_000


def _tell(parts: Sequence[str]) -> None:
    """One line; on a terminal that is too narrow, what the event was about has a line of its own."""
    line = "  ".join(parts).rstrip()
    if not sys.stdout.isatty() or columns(printable(line)) <= width():
        print_line(line)
        return
    print_line("  ".join([*parts[:2], *(part.strip() for part in parts[2:-1] if part.strip())]))
    print_line(f"{INDENT}{parts[-1]}".rstrip())


def _exit(event: "Event") -> str:
    if event.exit_code is not None:
        return f"exit {event.exit_code}"
    return event.error or ""


def _about(event: "Event") -> str:
    """What the event was about: the command, the path, the label, the sandbox."""
    operation = event.operation
    if event.kind == "sandbox.checkpoint_created":
        label = " ".join(operation.command) if operation is not None else ""
        how = "(automatic)" if event.automatic else label
        return f"{event.checkpoint_id or ''} {how}".rstrip()
    if operation is not None:
        words = operation.command
        return words[2] if words[:2] == SHELL and len(words) == 3 else " ".join(words)
    if event.kind == "sandbox.closed" and event.destroyed:
        return f"{shown_address(event.sandbox_id)} (destroyed)"
    source = f" from checkpoint {event.checkpoint_id}" if event.checkpoint_id is not None else ""
    return f"{shown_address(event.sandbox_id)}{source}"


def _operation_fields(operation: "Operation | None") -> dict[str, Any] | None:
    if operation is None:
        return None
    return {
        "kind": operation.kind,
        "command": list(operation.command),
        "cwd": operation.cwd,
        "user": operation.user,
        "environment": list(operation.environment),
        "input": operation.input.hex(),
    }


async def _print_output(invocation: Invocation, repo: "Repository", thread: str, sequence: int) -> None:
    event = await _completed(repo, thread, sequence)
    stdout, stderr = await repo.read_output(event.stdout), await repo.read_output(event.stderr)
    if invocation.json:
        fields = {"message_type": "output", "thread_id": thread, "sequence": event.sequence, "exit_code": event.exit_code}
        told = dict([*_stream_fields("stdout", stdout), *_stream_fields("stderr", stderr)])
        print_json({**fields, **told, "truncated": event.truncated})
        return
    for stream, data in ((sys.stdout, stdout), (sys.stderr, stderr)):
        stream.flush()
        stream.buffer.write(data)
        stream.flush()


def _stream_fields(name: str, data: bytes) -> Iterator[tuple[str, str]]:
    try:
        yield name, data.decode("utf-8")
    except UnicodeDecodeError:
        yield name, data.decode("utf-8", "backslashreplace")
        yield f"{name}_b64", base64.b64encode(data).decode("ascii")


async def _completed(repo: "Repository", thread: str, sequence: int) -> "Event":
    """The end of the command that the event of this number is about."""
    found = await repo.checkpoints.events(thread, after=min(max(sequence - 1, 0), LAST), limit=1)
    event = found[0] if found and found[0].sequence == sequence else None
    if event is None:
        raise SnapshotError(
            f"Thread {printable(thread)} has no event {sequence}.",
            code=Code.INVALID_REQUEST,
            hint=f"'snapcore log {printable(thread)}' shows those there are.",
        )
    if event.kind == "exec.started":
        began = event
        async for later in _events(repo, thread, after=sequence):
            if later.started_id == began.id:
                return later
        raise SnapshotError(
            f"The command of event {sequence} has not ended.",
            code=Code.INVALID_REQUEST,
            hint="What it wrote is there once it has.",
        )
    if event.kind != "exec.completed":
        raise SnapshotError(
            f"Event {sequence} is {event.kind}, which has no output.",
            code=Code.INVALID_REQUEST,
            hint="Name the event of a command.",
        )
    return event
