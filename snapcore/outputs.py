"""What commands write: handed on as it comes, kept without secrets, and read back from the ledger."""

import inspect
from typing import Any, Protocol

from .engine import Engine
from .errors import Code, SnapshotError
from .ingest import Ingestor
from .ledger import MAX_INLINE_OUTPUT, Output
from .model import RecordType
from .records import RecordReader
from .redaction import Redactor
from .sandboxes import ExecResult, OutputCallback

__all__ = ["Writable", "inline_output", "output_callback", "read_output", "settle_output", "store_output", "without_secrets"]


class Writable(Protocol):
    """A pipe, a file opened for bytes, an asyncio `StreamWriter`."""

    def write(self, data: bytes, /) -> Any:
        """Take bytes. A number that is returned says how many of them were taken."""
        ...


def output_callback(target: "OutputCallback | Writable | None") -> OutputCallback | None:
    """The function that hands pieces of output on to `target`. Raises `SnapshotError` `INVALID_REQUEST`."""
    if target is None:
        return None
    write = getattr(target, "write", None)
    if write is None:
        if not callable(target):
            raise SnapshotError("on_output is a function, or something to write bytes to.", code=Code.INVALID_REQUEST)
        return target
    flush = getattr(target, "flush", None)

    def hand_on(stream: str, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest:
            taken = write(bytes(rest))
            rest = rest[taken:] if isinstance(taken, int) and taken > 0 else rest[:0]
        if flush is not None:
            flush()

    return hand_on


async def settle_output(target: "OutputCallback | Writable | None") -> None:
    """Wait until a `StreamWriter` has room again."""
    drain = getattr(target, "drain", None)
    if drain is not None:
        waiting = drain()
        if inspect.isawaitable(waiting):
            await waiting


def without_secrets(redactor: Redactor, result: ExecResult, limit: int) -> ExecResult:
    """A result without secrets and with at most `limit` bytes of each output.

    It was asked for with `limit` and `Redactor.reach` bytes: where an output was cut on the way, the part of a secret that may be
    left before the cut goes with the last bytes.
    """
    asked = limit + redactor.reach
    full = len(result.stdout) >= asked or len(result.stderr) >= asked

    def clean(data: bytes) -> bytes:
        text = redactor.scrub_bytes(data)
        # when neither is that long, the provider cut one of them itself, and does not say which
        cut = len(data) >= asked if full else result.truncated
        return text[: max(len(text) - redactor.reach, 0)][:limit] if cut else text[:limit]

    long = len(result.stdout) > limit or len(result.stderr) > limit
    return ExecResult(result.exit_code, clean(result.stdout), clean(result.stderr), result.truncated or long)


def inline_output(data: bytes) -> Output | None:
    """An output that its event holds; None when it is too large for that."""
    return Output(len(data), data) if len(data) <= MAX_INLINE_OUTPUT else None


async def store_output(ingestor: Ingestor, data: bytes) -> Output:
    """An output for an event; a large one is put into the blob store."""
    return inline_output(data) or Output(len(data), b"", await ingestor.store(data))


async def read_output(engine: Engine, output: Output) -> bytes:
    """The bytes of a recorded output. Raises `SnapshotError` `MISSING_BLOB` or `INVALID_BLOB`."""
    if output.ref is None:
        return output.data
    reader = RecordReader(engine)
    ids = await reader.chunk_ids(output.ref)
    raws = await reader.fetch(ids, RecordType.CHUNK)
    return b"".join(raws[i] for i in ids)
