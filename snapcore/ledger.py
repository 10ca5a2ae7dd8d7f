"""The contract of the ledger: what was done in the sandboxes of a thread, in order, by whom.

Events are appended by whoever holds the thread's claim. A claim is taken under the thread's writer lease, so never in the middle
of another's capture or pause, and ends the one before it for good: what a superseded worker appends, or commits with an
event, is refused in the same transaction.
"""

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from .model import ContentRef, WriterLease
from .sandboxes import Binding

if TYPE_CHECKING:
    from .protocols import Commit

__all__ = ["MAX_INLINE_OUTPUT", "Claim", "Event", "EventKind", "LedgerStore", "Operation", "Output", "Point", "SpecRecord"]

MAX_INLINE_OUTPUT: Final = 4096
"""Outputs up to this many bytes are kept in their event, larger ones in the blob store."""


class EventKind:
    """Kinds of event. Plain texts: they are stored, and printed by `snapcore log`."""

    CREATED: Final = "sandbox.created"  # a new sandbox, with nothing restored into it
    OPENED: Final = "sandbox.opened"  # the thread's sandbox, opened again
    RESUMED: Final = "sandbox.resumed"  # a new sandbox, with `checkpoint_id` restored into it
    EXEC_STARTED: Final = "exec.started"
    EXEC_COMPLETED: Final = "exec.completed"
    FILE_WRITTEN: Final = "file.written"
    CHECKPOINT: Final = "sandbox.checkpoint_created"
    PAUSED: Final = "sandbox.paused"
    CLOSED: Final = "sandbox.closed"  # the session let go of it; with `destroyed` it is gone


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """What tells one operation from another: equal means the same. Texts are redacted, secrets as `{secret:NAME}`.

    `command` holds the arguments of an exec (a text as `sh -c` gets it), the path of a write, the label of a checkpoint (none:
    empty). `environment` are names only, sorted. `input` is the BLAKE3 (32 bytes) of the redacted stdin or content, empty
    where there is none.
    """

    kind: str  # exec | write | checkpoint
    command: tuple[str, ...] = ()
    cwd: str | None = None
    user: str | None = None
    environment: tuple[str, ...] = ()
    input: bytes = b""


class Output(msgspec.Struct, frozen=True):
    """What a command wrote, redacted: its size in bytes, and either the bytes or where they are stored."""

    size: int = 0
    data: bytes = b""
    ref: ContentRef | None = None


class SpecRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox was made from, to make another like it: the fields of `SandboxSpec` without its name, and of the environment
    and of the options the names only. `roots` are the captured folders by name, empty when it is the workspace root alone."""

    image: str | None = None
    workspace_root: str = "/workspace"
    user: str | None = None
    environment: tuple[str, ...] = ()
    cpus: float | None = None
    memory_bytes: int | None = None
    labels: dict[str, str] = {}
    timeout: float | None = None
    options: tuple[str, ...] = ()
    roots: dict[str, str] = {}


class Point(msgspec.Struct, frozen=True):
    """A place in a thread's ledger: with this event and all before it. 0: before the first."""

    thread_id: str
    sequence: int


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a thread's ledger. `id` is 32 random hex digits, chosen by the writer. The store sets `thread_id`, `sequence`
    (1, 2, 3, ... in each thread), `at` (microseconds since the epoch, by the database's clock; never less than the event before
    has, and more than the thread's checkpoints have), `fence` (the claim's)."""

    id: str
    kind: str
    thread_id: str = ""
    sequence: int = 0
    at: int = 0
    fence: int = 0
    sandbox_id: str = ""
    step: int | None = None  # affecting operations of this line of work up to here
    operation: Operation | None = None
    outside: bool | None = None  # whether it reaches outside of the captured roots; None: nobody said
    at_most_once: bool = False
    started_id: str | None = None  # exec.completed: the event that it completes
    reruns: str | None = None  # exec.started, file.written: the uncertain or outside operation (an id) that is done once more
    exit_code: int | None = None
    stdout: Output = Output()
    stderr: Output = Output()
    truncated: bool = False
    error: str | None = None  # the code of the error that ended an exec without an exit code
    checkpoint_id: str | None = None
    continues: Point | None = None  # sandbox.resumed: where the line of work stands that led to the checkpoint
    drops: Point | None = None  # the recorded operations of this line from here on were given up before this event
    automatic: bool = False  # a checkpoint nobody asked for by name, or an operation by hand: none that is replayed
    binding: Binding | None = None
    spec: SpecRecord | None = None
    snapshot: str | None = None  # the provider's own, taken beside the checkpoint
    destroyed: bool = False


class Claim(msgspec.Struct, frozen=True):
    """The right to write a thread's ledger: `fence` grows with every claim, and only the newest counts."""

    thread_id: str
    token: str
    fence: int


class LedgerStore(Protocol):
    """Part of `CheckpointStore`, in the same database. A claim that is not the thread's newest raises `CheckpointWriterLostError`
    wherever it is used, and nothing is changed."""

    async def claim_ledger(self, lease: WriterLease, token: str) -> Claim:
        """Take the thread's ledger; every earlier claim on it ends. `token` is 32 random hex digits. Repeated with the same token
        while that claim is the newest, the call returns it again. The lease is kept. Raises `CheckpointWriterLostError` when
        the lease is not in force."""
        ...

    async def append_event(
        self, claim: Claim, event: Event, *, lease: WriterLease | None = None, commit: "Commit | None" = None
    ) -> Event:
        """Append an event and return it as it is stored. Repeated with the same event, the stored one is returned: an answer lost
        on the way is found by repeating. Another event of that id raises `CheckpointConflictError` `DUPLICATE_ID`.

        `commit` enters the records that the outputs of the event refer to, as `append` does, under `lease`: one of any thread,
        which is released. Raises `RecordsMissingError` as `append` does; `SnapshotError` `INVALID_ENTRY` for an event that is
        not well formed, or has stored outputs and no commit, `INVALID_REQUEST` for a commit without a lease or with an event.
        """
        ...

    async def events(self, thread_id: str, *, after: int = 0, limit: int = 500) -> list[Event]:
        """Up to `limit` events of the thread with a sequence number above `after`, in order."""
        ...

    async def sandbox_thread(self, sandbox_id: str) -> str | None:
        """The thread that last created, opened or resumed that sandbox."""
        ...
