"""The contracts between the engine and its adapters.

Each method states what it guarantees, whether repeating it is safe, and what it raises. Conformance suites for all of
them are in `snapcore.testing`. Unless a method says otherwise: it may be called concurrently, cancelling it leaves
nothing half done (an atomic step may still have happened), and an unreachable backend raises `RepositoryError` (stores)
or `ProviderError` (sandboxes) with `retryable=True`.
"""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import msgspec

from .ledger import Claim, Event, LedgerStore
from .maintenance import MaintenanceStore
from .model import (
    Capabilities,
    Checkpoint,
    FileStat,
    Holder,
    Location,
    PackWrite,
    StatPage,
    StatUpdate,
    ThreadInfo,
    WriterLease,
)
from .runs import RunStore

__all__ = [
    "BlobInfo",
    "BlobStore",
    "Buffer",
    "CheckpointStore",
    "Commit",
    "FileHandle",
    "Grant",
    "PackInfo",
    "Pin",
    "PlaceStep",
    "ProgressCallback",
    "ReadBlock",
    "RemoveStep",
    "SandboxClock",
    "ScanSelection",
    "SetMetaStep",
    "Stage",
    "StageFile",
    "StageFolder",
    "StageHardLink",
    "StageLink",
    "StageWrite",
    "Step",
    "StoreIdentity",
    "SwapReport",
    "Workspace",
]

Buffer = bytes | bytearray | memoryview
ProgressCallback = Callable[[Any], None]


# ---------------------------------------------------------------------------------------------------- blob stores


class BlobInfo(msgspec.Struct, frozen=True):
    """A stored blob: its key and size in bytes."""

    key: str
    size: int


class BlobStore(Protocol):
    """Named immutable byte strings. Keys are relative paths of `[a-z0-9._-]` parts joined by `/`, at most 200 characters;
    no part starts with a dot, and no key lies under another (`a` and `a/b`). Others raise `SnapshotError` `INVALID_REQUEST`.

    A blob that `put` has returned for is durable and read whole by every later `get`, from any process. Nothing is
    ever visible under its key in part. `get`, `head` and `put` are enough to capture and restore.
    """

    @property
    def url(self) -> str:
        """The address of this store, without credentials."""
        ...

    @property
    def uploads_at_once(self) -> int:
        """How many puts at once serve it best. Each holds a pack in memory."""
        ...

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes `[offset, offset + length)`, or to the end. Raises `SnapshotError` with `MISSING_BLOB` when there is no such
        blob, `INVALID_BLOB` when it ends before `offset + length`."""
        ...

    async def head(self, key: str) -> BlobInfo | None:
        """Key and size, or None when there is no such blob."""
        ...

    async def put(self, key: str, data: Buffer) -> None:
        """Store `data` durably before returning. Repeating it is safe; a put over an existing key replaces it atomically.
        Raises `RepositoryError` with `STORE_FULL` when there is no room; the key is then as it was."""
        ...

    async def delete(self, key: str) -> None:
        """Remove the blob; removing what is not there is no error."""
        ...

    def list(self, prefix: str = "") -> AsyncIterator[BlobInfo]:
        """All blobs whose key starts with `prefix`, in no particular order, each once. For maintenance only."""
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...


# ---------------------------------------------------------------------------------------------- checkpoint stores


class StoreIdentity(msgspec.Struct, frozen=True):
    """What ties a database to its blob store."""

    repository_id: str
    database_id: str


class Grant(msgspec.Struct, frozen=True):
    """What `acquire_writer` found, all in one transaction: the lease, the thread's head, the manifest that the stat cache of
    the sandbox and each root asked for aligns with (by root name) and the redaction fingerprint it was made under,
    checkpoints deleted since the head was written, whether the store holds any record at all, and whether records were lost
    since the writer of the head's content took its lease (`damaged`): its contents cannot be relied on unseen then."""

    lease: WriterLease
    head: Checkpoint | None = None
    bases: dict[str, bytes] = {}
    base_redactions: dict[str, bytes] = {}
    deleted: tuple[str, ...] = ()
    has_records: bool = True
    damaged: bool = False


class Commit(msgspec.Struct, frozen=True):
    """What a new checkpoint rests on.

    `packs`: put into the blob store, their records not entered yet. `own`: packs entered earlier by `add_pack` under this
    lease. `refs`: ids of records referred to by the checkpoint that lie in neither and that the locked head does not
    refer to. `stats`: stat cache updates saved in the same transaction. `event`: names the checkpoint, and is appended to the
    thread's ledger in the same transaction, once however often the commit is repeated; a claim that is not the newest raises
    `CheckpointWriterLostError`, and nothing is committed then. When an idempotency key is taken, there is no new event.
    """

    packs: tuple[PackWrite, ...] = ()
    own: tuple[str, ...] = ()
    refs: tuple[bytes, ...] = ()
    stats: tuple[StatUpdate, ...] = ()
    event: tuple[Claim, Event] | None = None


class Pin(msgspec.Struct, frozen=True):
    """A reader's hold on trees: gc treats all that the manifests `roots` lead to as live until `expires_at`."""

    id: str
    roots: tuple[bytes, ...]
    expires_at: int


class PackInfo(msgspec.Struct, frozen=True):
    """A pack's row."""

    pack_id: str
    state: str
    size: int
    commit_seq: int | None


class CheckpointStore(MaintenanceStore, LedgerStore, RunStore, Protocol):
    """Threads, checkpoints, leases, packs, the ledger, runs of jobs and the stat cache: one transactional store. What only gc and
    repair need of it is in `MaintenanceStore`, the ledger in `LedgerStore`, runs in `RunStore`.

    Every mutating method is one transaction that first locks the repository row; a failure leaves the state unchanged.
    Checkpoints returned are independent values. Lists order by `created_at`, then id as UTF-8 bytes. Invalid thread or
    checkpoint ids raise `SnapshotError` with `INVALID_ID` before anything is touched. A lease that expired, was released
    or was taken over raises `CheckpointWriterLostError` wherever it is used.
    """

    @property
    def url(self) -> str:
        """The address of this store, without credentials."""
        ...

    async def identity(self) -> StoreIdentity | None:
        """The ids this store was initialised with, or None when it never was."""
        ...

    async def initialize(self, identity: StoreIdentity) -> StoreIdentity:
        """Create the schema and set the ids. When the store is initialised already, change nothing. Returns the ids in force."""
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...

    async def now(self) -> int:
        """The database's clock, microseconds since the epoch."""
        ...

    # ---- writer leases

    async def acquire_writer(
        self,
        thread_id: str,
        *,
        ttl: float = 120.0,
        holder: Holder | None = None,
        pack_id: str | None = None,
        sandbox_id: str | None = None,
        roots: Sequence[str] = (),
        token: str | None = None,
    ) -> Grant:
        """Take the thread's lease for `ttl` seconds, without waiting; the thread need not exist yet.

        Every acquisition has a larger fence than all before. A lease that is in force raises
        `CheckpointWriterConflictError`, unless its holder is a process of this host that is gone. `pack_id` is entered as
        a pack in state `writing`, owned by the new lease. `sandbox_id` with `roots` asks for `Grant.bases`.

        `token`, 32 random hex digits of the caller's own, becomes the lease's. Repeated with the same token and `ttl` while that
        lease is in force, the call grants the very lease again: an answer lost on the way is found by repeating. When it ran
        out meanwhile, `CheckpointWriterLostError`; when it is another thread's, `CheckpointConflictError` `DUPLICATE_ID`.
        """
        ...

    async def renew_writer(self, lease: WriterLease) -> WriterLease:
        """Extend the lease by its ttl from now. An expired lease cannot be renewed, whether or not it was taken over."""
        ...

    async def release_writer(self, lease: WriterLease) -> None:
        """Give the lease up. Raises `CheckpointWriterLostError` when it is no longer this writer's."""
        ...

    # ---- packs and records

    async def reserve_packs(self, lease: WriterLease, pack_ids: Sequence[str]) -> None:
        """Enter packs in state `writing`, owned by the lease: before they are put. Safe to repeat."""
        ...

    async def add_pack(self, lease: WriterLease, pack: PackWrite) -> frozenset[bytes]:
        """Enter the records of a reserved pack that was put, the pack staying `writing`.

        Returns the ids whose rows lead to a pack that is live, condemned or of this lease: the new pack's copy is then not
        used, and the commit of this pack stamps the other one by itself; they need not be in `Commit.refs`. Safe to repeat.
        A pack that is not `writing` and of this lease raises `CheckpointWriterLostError`.
        """
        ...

    async def known(self, ids: Collection[bytes]) -> frozenset[bytes]:
        """Which of the record ids have a row in a pack that is live or condemned. A hint: commits check again. Records in
        packs that are still `writing`, this writer's own too, do not count."""
        ...

    async def locate(self, ids: Collection[bytes]) -> dict[bytes, Location]:
        """Where records are. Ids without a row are absent from the answer."""
        ...

    async def packs(self) -> list[PackInfo]:
        """Every pack's row, ordered by id."""
        ...

    async def record_totals(self) -> tuple[int, int]:
        """(number of records, their raw size in bytes) over all packs."""
        ...

    # ---- checkpoints

    async def append(
        self,
        lease: WriterLease,
        checkpoint: Checkpoint,
        commit: Commit,
        *,
        source: tuple[str, str] | None = None,
        release: bool = True,
    ) -> Checkpoint:
        """Append `checkpoint` to its thread, move the head to it, enter `commit`, and release the lease if asked.

        In one transaction: the lease is checked by token, fence and the database's clock; `parent_id` must be the head
        (`STALE_HEAD` when the thread moved on, `PARENT_MISMATCH` when the parent is not of this thread); the id must be new
        (`DUPLICATE_ID`); the checkpoint must be well formed (`INVALID_ENTRY`). Every pack that holds a record of `commit`
        is stamped live with a new sequence number. Records without a row, or in another writer's pack that is still `writing`,
        raise `RecordsMissingError`; the checkpoint's own record and manifests are always looked up. A pack of `commit` that is
        not `writing` and of this lease raises `CheckpointWriterLostError`. `source` names a
        (thread, checkpoint) whose records the new one shares: its row is locked and must exist
        (`MISSING_CHECKPOINT`).

        A repeated append of the same checkpoint (same id and record id) returns it again: an answer lost on the way is
        found by repeating. `created_at` is stored as given. When `idempotency_key` is taken in the thread, the checkpoint that
        holds it is returned and nothing is appended.
        """
        ...

    async def fork(self, lease: WriterLease, checkpoint: Checkpoint, commit: Commit) -> Checkpoint:
        """Start the empty thread of `lease` with `checkpoint`, whose `source_thread_id` and `source_id` name what it copies.

        Raises `SnapshotError` `MISSING_CHECKPOINT` when the source is not a checkpoint of that thread;
        `CheckpointConflictError` `SAME_THREAD`, or `DESTINATION_NOT_EMPTY` when the destination has checkpoints. The source
        is locked and does not change. The lease is released.
        """
        ...

    async def set_label(
        self, lease: WriterLease, checkpoint_id: str, label: str | None, record_id: bytes, commit: Commit
    ) -> Checkpoint:
        """Change a checkpoint's label (and its reason, as `relabelled` says); `record_id` is the record that says so.
        The lease is kept."""
        ...

    async def delete(self, lease: WriterLease, checkpoint_ids: Sequence[str]) -> list[Checkpoint]:
        """Remove checkpoints from their thread; when the head is among them, the newest that remains becomes the head. Frees
        their idempotency keys. `MISSING_CHECKPOINT`, and nothing removed, when the thread has one of them not. The lease is
        kept. Returns what was removed."""
        ...

    async def get(self, thread_id: str, checkpoint_id: str) -> Checkpoint | None:
        """A checkpoint of the thread."""
        ...

    async def head(self, thread_id: str) -> Checkpoint | None:
        """The newest checkpoint of the thread."""
        ...

    async def by_label(self, thread_id: str, label: str) -> Checkpoint | None:
        """The newest checkpoint of the thread with that label."""
        ...

    async def by_idempotency_key(self, thread_id: str, key: str) -> Checkpoint | None:
        """The checkpoint that was appended under that key."""
        ...

    async def checkpoints(self, thread_id: str) -> list[Checkpoint]:
        """All checkpoints of the thread, oldest first."""
        ...

    async def find(self, prefix: str, thread_id: str | None = None) -> list[Checkpoint]:
        """Checkpoints whose id starts with `prefix`, of one thread or all, at most 20."""
        ...

    async def threads(self) -> list[ThreadInfo]:
        """All threads that have a checkpoint, ordered by id as UTF-8 bytes."""
        ...

    # ---- readers

    async def pin(self, roots: Sequence[bytes], source: tuple[str, str], *, ttl: float = 3600.0) -> Pin:
        """Hold trees, by the ids of their manifests, for `ttl` seconds. `source` is locked and must exist (`MISSING_CHECKPOINT`).
        Raises `RepositoryError` `READ_ONLY` when the database cannot be written."""
        ...

    async def renew_pin(self, pin: Pin, *, ttl: float = 3600.0) -> Pin:
        """Hold the records for `ttl` seconds from now. Raises `RepositoryError` when the pin has run out."""
        ...

    async def unpin(self, pin: Pin) -> None:
        """Let go. Idempotent."""
        ...

    # ---- the stat cache: losing any of it costs time, never correctness

    async def stat_digests(self, sandbox_id: str, root: str) -> dict[bytes, bytes]:
        """Digest by page id of every stat page of this sandbox and root."""
        ...

    async def stat_pages(self, sandbox_id: str, root: str, page_ids: Collection[bytes]) -> dict[bytes, StatPage]:
        """The stat pages of these manifest pages; those that are not there are absent."""
        ...

    async def save_stats(self, updates: Sequence[StatUpdate]) -> None:
        """Apply updates outside a commit (after a restore)."""
        ...


# ----------------------------------------------------------------------------------------------------- workspaces


class ScanSelection(Protocol):
    """What a scan needs of a policy, so that excluded folders are pruned where the files are."""

    def excludes(self, path: bytes, kind: int) -> bool:
        """Whether the path is left out; an excluded folder is not listed. Called in walk order, from any one thread."""
        ...

    @property
    def marked_folders(self) -> dict[bytes, bytes]:
        """Folder names that are excluded only when they hold a certain file: `{b"venv": b"pyvenv.cfg"}`."""
        ...


class SandboxClock(msgspec.Struct, frozen=True):
    """The sandbox's own clock and how coarse its file times are, both in nanoseconds."""

    now_ns: int
    granularity_ns: int


class ReadBlock(msgspec.Struct, frozen=True, gc=False):
    """A piece of a file being read: `index` into the files asked for, bytes from `offset`.

    The last block of a file has `last`, and `after`: the file's stat once it had been read, None when it is gone.
    `problem` is a reason when it could not be read at all (then the only block of the file, with `last`).
    """

    index: int
    offset: int
    data: Buffer
    last: bool = False
    after: FileStat | None = None
    problem: str = ""


class StageFolder(msgspec.Struct, frozen=True):
    """Create a folder in the stage, mode 0700."""

    staged: bytes


class StageFile(msgspec.Struct, frozen=True):
    """Write `data` at `offset` of a staged file of `size` bytes, created when it is not there yet.

    Pieces may come in any order and never overlap. `last` is set on the piece that completes the file: its size, mode,
    mtime and (when not None) owner and `xattrs` are then set. All-zero stretches may be left as holes.
    """

    staged: bytes
    offset: int
    data: Buffer
    size: int
    last: bool
    mode: int = 0o600
    mtime_ns: int = 0
    owner: tuple[int, int] | None = None
    xattrs: dict[str, bytes] = {}


class StageLink(msgspec.Struct, frozen=True):
    """Create a symbolic link in the stage."""

    staged: bytes
    target: bytes
    mtime_ns: int
    owner: tuple[int, int] | None = None


class StageHardLink(msgspec.Struct, frozen=True):
    """Make `staged` another name of the staged file `first`, which is complete."""

    staged: bytes
    first: bytes


StageWrite = StageFolder | StageFile | StageLink | StageHardLink


class RemoveStep(msgspec.Struct, frozen=True, array_like=True, tag="remove"):
    """Take `path` out of the tree: a folder by rmdir (its contents are removed by steps of their own), else by a rename into
    the trash."""

    path: bytes
    folder: bool


class PlaceStep(msgspec.Struct, frozen=True, array_like=True, tag="place"):
    """Move `staged` to `path`. A file or link there is replaced atomically; a whole new folder moves with one rename."""

    staged: bytes
    path: bytes


class SetMetaStep(msgspec.Struct, frozen=True, array_like=True, tag="meta"):
    """Set mode (None: leave), mtime (None: leave) and owner (None: leave) of an existing file or folder, never of what a link
    leads to."""

    path: bytes
    mode: int | None
    mtime_ns: int | None
    owner: tuple[int, int] | None = None


Step = RemoveStep | PlaceStep | SetMetaStep


class SwapReport(msgspec.Struct, frozen=True):
    """What a swap could not do: (path, reason) of each step left undone. Everything else was done."""

    undone: tuple[tuple[bytes, str], ...] = ()


class Stage(Protocol):
    """A restore in the making: contents staged beside the tree, then swapped in under a journal.

    States: staged, sealed, swapping, done. Until `seal` returns, the tree is untouched and a crash leaves it so. After it,
    unless it is aborted before `swap`, the swap is completed by this process or by whoever calls `Workspace.recover` next.
    One stage a workspace at a time.
    """

    async def write(self, writes: Sequence[StageWrite]) -> None:
        """Create what is listed, in order, in one go. `ProviderError` `SANDBOX_FULL` when there is no room."""
        ...

    async def log(self, steps: Sequence[Step]) -> None:
        """Append steps to the journal. They are executed grouped: removals of non-folders in the order given, removals of
        folders in reverse order, placements in the order given, metadata in reverse order."""
        ...

    async def seal(self, *, durable: bool) -> None:
        """Make the journal durable; with `durable`, everything staged first. From here on a crash does not stop the swap.
        `ProviderError` `WORKSPACE_BUSY` when others hold the tree (`Workspace.hold`) for longer than this waits; nothing is
        sealed then."""
        ...

    async def swap(self) -> SwapReport:
        """Do the steps, remove the stage, and give up the lock. Finishes even when the caller is cancelled. Where the workspace
        `holds`, no other restore swaps until `abort`, so that the result can be looked at."""
        ...

    async def abort(self) -> None:
        """Before `swap`: remove the stage and give up the lock; the tree is as it was. A seal is taken back durably, before
        the tree may be held by others, so that nobody finishes the swap: of several stages all can be sealed, and on a
        failure all aborted. After `swap`: let others swap. After a `swap` that raised: only let go; it is finished as after
        a crash. Idempotent."""
        ...


class Workspace(Protocol):
    """The bulk view of a sandbox's files under one root. Calls are few and large; nothing here is per file.

    Scan and read never change anything, never open a FIFO, never follow a link out of the root.
    """

    @property
    def root(self) -> str:
        """The root's path in the sandbox."""
        ...

    @property
    def sandbox_id(self) -> str:
        """A stable name of this sandbox for the stat cache, without credentials. Empty when it has none: no stats are kept."""
        ...

    @property
    def host_path(self) -> str | None:
        """Where the root is in this host's file system, resolved; None when it is not on this host, or not known to be."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this workspace can do."""
        ...

    async def clock(self) -> SandboxClock:
        """The sandbox's time now, by the clock that stamps its files."""
        ...

    def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        """The tree in walk order (`path_key` order), in batches, starting with the root itself (path `b""`).

        Excluded paths, mount points and unreadable folders come once, with their `note`, and are not listed further. The
        stage's own folder never comes, nor one in the making. Entries that vanish meanwhile are passed over. Raises
        `SnapshotError` `MISSING_WORKSPACE` when there is no root, `INVALID_WORKSPACE` when it is no folder.
        """
        ...

    def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        """The contents of regular files, in order, at most the scanned `size` bytes of each, in batches of some MiB.

        Every file ends with one block that has `last`. What is no regular file any more has a `problem`.
        """
        ...

    def hold(self) -> AbstractAsyncContextManager[None]:
        """Recovers, then keeps restores from swapping until it is left, where `capabilities.holds`: what is scanned and read
        inside is then of no half-swapped tree. Holds do not exclude each other. `ProviderError` `WORKSPACE_BUSY` when a
        restore runs for longer than this waits. Elsewhere it only recovers."""
        ...

    async def recover(self) -> Literal["", "swept", "finished"]:
        """Clean up after a crashed restore: finish a sealed swap, sweep an unsealed stage. `ProviderError` `WORKSPACE_BUSY`
        when the restore is still running."""
        ...

    async def open_stage(self) -> Stage:
        """Create the stage, exclusively: the lock on this workspace. Recovers first. `ProviderError` `WORKSPACE_BUSY` when
        another restore runs. Creates the root when it is not there."""
        ...


# ------------------------------------------------------------------------------------------------------ sandboxes


class FileHandle(Protocol):
    """The least that a user's own sandbox handle needs: six file operations on absolute POSIX paths.

    Methods may be plain or async. Names that are not UTF-8 arrive with surrogate escapes. Beyond these, `rename(old, new)`,
    `symlink(target, path)`, `readlink(path)`, `link(existing, path)`, `chmod(path, mode)` and `utime(path, mtime_ns)` are used
    where the handle has them; what is missing shows in the capabilities and in the receipt of a restore.
    """

    def lstat(self, path: str) -> Any:
        """An object with `st_mode`, `st_size`, `st_mtime_ns` and, where known, `st_ctime_ns`, `st_ino`, `st_dev`, `st_nlink`,
        `st_uid`, `st_gid` (as `os.stat_result`). Raises `FileNotFoundError`."""
        ...

    def list(self, path: str) -> Any:
        """The names in a folder, without `.` and `..`."""
        ...

    def read(self, path: str) -> Any:
        """A file's bytes, or an (async) iterator of pieces of them."""
        ...

    def write(self, path: str, data: bytes) -> Any:
        """Create or replace a file."""
        ...

    def mkdir(self, path: str) -> Any:
        """Create a folder whose parent exists."""
        ...

    def remove(self, path: str) -> Any:
        """Remove a file, a link or an empty folder."""
        ...
