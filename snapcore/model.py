"""The values that snapcore passes around: all frozen, none holds a live resource.

Paths are `bytes`, relative to a workspace root, `/`-separated, without a leading or trailing slash; the root itself is
`b""`. Times of files are nanoseconds since the epoch (signed); times of checkpoints and leases are microseconds since
the epoch by the database's clock. Record ids are 32 bytes (BLAKE3 of type and content), pack ids 32 hex digits.
"""

import datetime
from typing import Final

import msgspec

from .errors import Code, SnapshotError

__all__ = [
    "DIGEST_BYTES",
    "EMPTY_CONTENT",
    "Capabilities",
    "Checkpoint",
    "ContentRef",
    "Entry",
    "FileStat",
    "Holder",
    "Kind",
    "Location",
    "Note",
    "PackRecord",
    "PackState",
    "PackWrite",
    "PolicyRecord",
    "Progress",
    "RecordType",
    "Redaction",
    "RootState",
    "Skipped",
    "StatPage",
    "StatUpdate",
    "ThreadInfo",
    "Totals",
    "WriterLease",
    "is_redacted",
    "path_key",
    "relabelled",
    "split_ids",
    "validate_id",
    "validate_path",
    "validate_text",
    "validate_thread_id",
]

DIGEST_BYTES: Final = 32
MAX_ID_BYTES: Final = 512


class Kind:
    """What an entry is. Plain integers: they are compared for every file and stored in manifests."""

    FILE: Final = 0
    DIR: Final = 1
    LINK: Final = 2
    FIFO: Final = 3
    SOCKET: Final = 4
    DEVICE: Final = 5

    NAMES: Final = ("file", "folder", "link", "FIFO", "socket", "device")


class Note:
    """Why a scanned path is not part of the tree (`FileStat.note`); the empty string means that it is."""

    NONE: Final = ""
    EXCLUDED: Final = "excluded"  # by the policy; a folder was not listed
    MOUNT: Final = "mount"  # another file system is mounted here; not listed
    UNREADABLE: Final = "unreadable"  # a folder that could not be listed, or a file that could not be stat'ed
    OUTSIDE: Final = "outside"  # a link that leads out of the workspace


class RecordType:
    """Types of record in a pack. The type byte is hashed with the content, so ids of different types never collide."""

    CHUNK: Final = 1
    CHUNK_LIST: Final = 2
    PAGE: Final = 3
    INDEX: Final = 4
    CHECKPOINT: Final = 5


class PackState:
    """States of a pack in the database; see docs/format.md."""

    WRITING: Final = "writing"
    LIVE: Final = "live"
    CONDEMNED: Final = "condemned"
    DELETING: Final = "deleting"
    DELETED: Final = "deleted"
    LOST: Final = "lost"


def split_ids(ids: bytes) -> list[bytes]:
    """The record ids of which `ids` is the concatenation."""
    if len(ids) == DIGEST_BYTES:
        return [ids]
    return [ids[i : i + DIGEST_BYTES] for i in range(0, len(ids), DIGEST_BYTES)]


class FileStat(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One path as a scan saw it. `inode` is 0 where it is not stable; `ctime_ns` is 0 where there is none.

    `target` is a link's target (bytes as stored in the file system); `note` is one of `Note`.
    """

    path: bytes
    kind: int
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0
    device: int = 0
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    target: bytes = b""
    note: str = ""


class Redaction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`length` bytes at `offset` were replaced by zeros: the secret `name` in the form `form` (raw, base64, url, ...)."""

    offset: int
    length: int
    name: str
    form: str


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One path as a manifest keeps it.

    `chunks` is the concatenation of the 32-byte ids of the content in order, empty for an empty file; a file of more
    than 64 chunks has the id of a chunk-list record in `chunk_list` instead. `hardlink` is the path of the first member
    of the hard-link group (in path order), empty for that member and for plain files. A link whose target was absolute
    and inside the root has `in_root` and keeps the target relative to the root.

    Up to 64 redactions are in `redactions`. More are kept as content: a MessagePack list, whose chunk ids are in
    `redaction_chunks`, or listed by the chunk-list record `redaction_list`; `redactions` is empty then.
    `RecordReader.redactions` reads either.
    """

    path: bytes
    kind: int
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    chunks: bytes = b""
    chunk_list: bytes = b""
    target: bytes = b""
    in_root: bool = False
    hardlink: bytes = b""
    uid: int = 0
    gid: int = 0
    xattrs: dict[str, bytes] = msgspec.field(default_factory=dict)
    redactions: tuple[Redaction, ...] = ()
    redaction_chunks: bytes = b""
    redaction_list: bytes = b""

    def chunk_ids(self) -> list[bytes]:
        """The ids in `chunks`, in order."""
        return split_ids(self.chunks)


class ContentRef(msgspec.Struct, frozen=True, array_like=True):
    """Stored bytes outside a tree (a conversation, an artifact): size in bytes, ids as in `Entry`."""

    size: int = 0
    chunks: bytes = b""
    chunk_list: bytes = b""
    redactions: tuple[Redaction, ...] = ()


EMPTY_CONTENT: Final = ContentRef()


class PolicyRecord(msgspec.Struct, frozen=True):
    """A file policy as a checkpoint saves it. `portable` is false when a callable took part, which cannot be saved."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    defaults: bool = True
    with_git: bool = False
    keep_rebuildable: bool = False
    portable: bool = True
    cross_mounts: bool = False


class Skipped(msgspec.Struct, frozen=True, array_like=True):
    """A path that capture left out, and why. Restore never removes it."""

    path: bytes
    reason: str


class Totals(msgspec.Struct, frozen=True):
    """What a tree holds: numbers of files, folders and links, and the files' size in bytes."""

    files: int = 0
    folders: int = 0
    links: int = 0
    bytes: int = 0


class RootState(msgspec.Struct, frozen=True):
    """One captured root: `manifest` is the id of its top index record, `path` where it was, `skipped` what was left out."""

    name: str
    path: str
    manifest: bytes
    content_id: bytes
    policy: PolicyRecord = PolicyRecord()
    totals: Totals = Totals()
    skipped: tuple[Skipped, ...] = ()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One saved state of a thread. `id` is chosen by the client; `created_at` is in microseconds since the epoch.

    `content_id` is equal for two checkpoints exactly when their trees are: names, kinds, modes, contents, links, and
    the modification times of files and links.
    """

    id: str
    thread_id: str
    parent_id: str | None = None
    created_at: int = 0
    reason: str = "automatic"  # automatic | named | fork-root | rewind
    label: str | None = None
    run_id: str | None = None
    step: int | None = None
    roots: tuple[RootState, ...] = ()
    content_id: bytes = b""
    conversation: ContentRef = EMPTY_CONTENT
    artifacts: dict[str, ContentRef] = {}
    warnings: tuple[str, ...] = ()
    redaction: bytes = b""  # fingerprint of the set of secrets, hooks and patterns in force
    idempotency_key: str | None = None
    source_thread_id: str | None = None  # of a fork or a rewind
    source_id: str | None = None
    deleted: tuple[str, ...] = ()  # checkpoints of this thread deleted since the parent was written
    record_id: bytes = b""  # id of this checkpoint's own record; empty inside that record
    revision: int = 0  # of several records of one checkpoint, the one with the highest counts
    recovered: bool = False  # entered by repair, from its record in a pack; false inside that record

    @property
    def created(self) -> datetime.datetime:
        """`created_at` as an aware datetime in UTC."""
        return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=self.created_at)

    @property
    def totals(self) -> Totals:
        """What all roots hold together."""
        parts = [root.totals for root in self.roots]
        return Totals(
            files=sum(t.files for t in parts),
            folders=sum(t.folders for t in parts),
            links=sum(t.links for t in parts),
            bytes=sum(t.bytes for t in parts),
        )


class ThreadInfo(msgspec.Struct, frozen=True):
    """A thread: its head (None when every checkpoint was deleted), how many checkpoints it has, the newest's time."""

    thread_id: str
    head_id: str | None
    checkpoints: int
    updated_at: int


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lease or a stage: enough to tell on the same host whether that process is still alive."""

    host: str = ""
    pid: int = 0
    boot_id: str = ""
    started: int = 0  # start of the process, in the kernel's clock ticks since boot

    def describe(self) -> str:
        """For messages: the process and its host."""
        return f"process {self.pid} on {self.host}" if self.pid else "another writer"


class WriterLease(msgspec.Struct, frozen=True):
    """A thread's writer lease. `fence` grows with every acquisition; times are by the database's clock, and
    `acquired_at` is never less than the thread's newest event has."""

    thread_id: str
    token: str
    fence: int
    acquired_at: int
    expires_at: int
    ttl: int  # microseconds


class PackRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A record's place in its pack: `offset` and `stored_size` of the payload, after the record's header."""

    id: bytes
    type: int
    offset: int
    stored_size: int
    raw_size: int
    codec: int


class PackWrite(msgspec.Struct, frozen=True):
    """A pack that was put into the blob store and whose records are to be entered in the database."""

    pack_id: str
    size: int
    records: tuple[PackRecord, ...]


class Location(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a record is: the pack, and the payload's place in it."""

    pack_id: str
    offset: int
    stored_size: int
    raw_size: int
    codec: int


class StatPage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The stat cache of one manifest page of one sandbox: `digest` of the page's scan, `data` its packed stats."""

    page_id: bytes
    digest: bytes
    data: bytes


class StatUpdate(msgspec.Struct, frozen=True):
    """A change of the stat cache of one root of one sandbox; it now aligns with `manifest`.

    `saved` are pages to insert or replace. Rows of this sandbox and root whose page is in `dropped` are deleted;
    `replace` drops every row first.
    """

    sandbox_id: str
    root: str
    manifest: bytes
    saved: tuple[StatPage, ...] = ()
    dropped: tuple[bytes, ...] = ()
    replace: bool = False
    redaction: bytes = b""


class Progress(msgspec.Struct, frozen=True):
    """A report of long work: its phase, files and bytes done, totals where they are known. `unit` is what `files` counts, one of
    them: `file`, `pack`, `record`, `checkpoint`, `thread`."""

    phase: str
    files: int = 0
    bytes: int = 0
    total_files: int | None = None
    total_bytes: int | None = None
    unit: str = "file"


class Capabilities(msgspec.Struct, frozen=True):
    """What a workspace can do. What it cannot is reported, never emulated unsafely.

    `time_granularity_ns` is the coarseness of its file times; `atomic_swap` means that a restore is staged and
    journaled; `holds` that a hold keeps restores from swapping; the others name abilities one by one.
    """

    time_granularity_ns: int = 20_000_000
    stable_inodes: bool = False
    ctime: bool = False
    atomic_swap: bool = False
    rename: bool = False
    symlinks: bool = False
    hard_links: bool = False
    modes: bool = False
    mtimes: bool = False
    owners: bool = False
    sparse: bool = False
    holds: bool = False


def relabelled(checkpoint: Checkpoint, label: str | None) -> Checkpoint:
    """The checkpoint with another label, one revision later. How a fork or a rewind came about stays its reason."""
    reason = checkpoint.reason
    if reason in ("automatic", "named"):
        reason = "automatic" if label is None else "named"
    return msgspec.structs.replace(checkpoint, label=label, reason=reason, revision=checkpoint.revision + 1)


def is_redacted(entry: Entry) -> bool:
    """Whether secrets were taken out of a file's content."""
    return bool(entry.redactions or entry.redaction_chunks or entry.redaction_list)


def path_key(path: bytes) -> bytes:
    """A key whose byte order is depth-first walk order: `/` sorts lowest, and no name can hold a NUL."""
    return path.replace(b"/", b"\0")


def validate_path(path: bytes) -> None:
    """Refuse a path that could lead out of a root: absolute, empty component, `.`, `..`, NUL. The root `b""` is valid."""
    if not path:
        return
    parts = b"/" + path + b"/"
    if b"\0" in parts or b"//" in parts or b"/./" in parts or b"/../" in parts:
        raise SnapshotError(f"The path {path!r} is not a plain relative path.", code=Code.INVALID_PATH, paths=[path])


def validate_text(value: object, what: str, *, code: Code = Code.INVALID_ID) -> None:
    """Refuse what is no text, is empty, over 512 bytes, not valid UTF-8, or holds a control character. `what` begins the
    message, `code` is the error's."""
    if not isinstance(value, str) or not value:
        raise SnapshotError(f"{what} must be a non-empty text.", code=code)
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise SnapshotError(f"{what} holds a lone surrogate, which is not valid text.", code=code) from None
    if size > MAX_ID_BYTES:
        raise SnapshotError(f"{what} has {size} bytes; at most {MAX_ID_BYTES} are allowed.", code=code)
    if any(ch < " " or ch == "\x7f" for ch in value):
        raise SnapshotError(f"{what} holds a control character.", code=code)


def validate_id(value: object) -> None:
    """Refuse a checkpoint id that is empty, over 512 bytes, not valid UTF-8, or holds a control character, `/` or `:`."""
    validate_text(value, "A checkpoint id")
    if isinstance(value, str) and (set(value) & set("/:") or value == "latest"):
        raise SnapshotError("A checkpoint id must not hold '/' or ':', nor be 'latest'.", code=Code.INVALID_ID)


def validate_thread_id(value: object) -> None:
    """Refuse a thread id that is empty, over 512 bytes, not valid UTF-8, or holds a control character."""
    validate_text(value, "A thread id")
