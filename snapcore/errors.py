"""Every error that snapcore raises, grouped by what a handler would do with it.

    SnapcoreError
    ├── CheckpointConflictError        the thread moved on, or the id or the destination is taken: read again, then retry
    ├── CheckpointWriterConflictError  another writer holds the thread: wait, or let it be
    ├── CheckpointWriterLostError      this writer's lease ran out or was taken over: start the capture again
    ├── RecordsMissingError            stored records that a commit refers to are gone: store them again, then retry
    ├── SnapshotError                  this workspace, checkpoint or request cannot be captured or restored as asked
    ├── RepositoryError                the repository itself: absent, foreign, damaged, full, out of reach
    ├── ProviderError                  the sandbox: absent, unreachable, without a needed ability
    ├── ReplayDivergedError            a replayed operation is not the recorded one
    └── StepFailedError                a step of a workflow ended with an exit code that is not allowed

`code` is stable and append-only; `str(error)` says what happened and what to do, and never holds a secret.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

__all__ = [
    "CheckpointConflictError",
    "CheckpointWriterConflictError",
    "CheckpointWriterLostError",
    "Code",
    "ProviderError",
    "RecordsMissingError",
    "ReplayDivergedError",
    "RepositoryError",
    "SnapcoreError",
    "SnapshotError",
    "StepFailedError",
    "printable",
]


class Code(StrEnum):
    """Stable error codes. New ones are added at the end of their group; none is ever renamed or removed."""

    # conflicts
    STALE_HEAD = "STALE_HEAD"
    PARENT_MISMATCH = "PARENT_MISMATCH"
    DUPLICATE_ID = "DUPLICATE_ID"
    DESTINATION_NOT_EMPTY = "DESTINATION_NOT_EMPTY"
    SAME_THREAD = "SAME_THREAD"
    WRITER_HELD = "WRITER_HELD"
    WRITER_LOST = "WRITER_LOST"
    RECORDS_MISSING = "RECORDS_MISSING"
    # snapshots
    MISSING_CHECKPOINT = "MISSING_CHECKPOINT"
    UNSUPPORTED_ENTRY = "UNSUPPORTED_ENTRY"
    UNREADABLE_ENTRY = "UNREADABLE_ENTRY"
    TORN_READ = "TORN_READ"
    INVALID_PATH = "INVALID_PATH"
    INVALID_WORKSPACE = "INVALID_WORKSPACE"
    MISSING_BLOB = "MISSING_BLOB"
    INVALID_BLOB = "INVALID_BLOB"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    POLICY_REQUIRED = "POLICY_REQUIRED"
    INVALID_ID = "INVALID_ID"
    INVALID_REQUEST = "INVALID_REQUEST"
    INVALID_ENTRY = "INVALID_ENTRY"
    SECRET_IN_NAME = "SECRET_IN_NAME"  # noqa: S105
    EMPTY_RESTORE = "EMPTY_RESTORE"
    RESTORE_BLOCKED = "RESTORE_BLOCKED"
    VERIFY_FAILED = "VERIFY_FAILED"
    AMBIGUOUS_ID = "AMBIGUOUS_ID"
    MISSING_WORKSPACE = "MISSING_WORKSPACE"
    INVALID_ARCHIVE = "INVALID_ARCHIVE"
    # repositories
    NO_REPOSITORY = "NO_REPOSITORY"
    REPOSITORY_EXISTS = "REPOSITORY_EXISTS"
    WRONG_DATABASE = "WRONG_DATABASE"
    UNSUPPORTED_FORMAT = "UNSUPPORTED_FORMAT"
    DAMAGED = "DAMAGED"
    READ_ONLY = "READ_ONLY"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    STORE_FULL = "STORE_FULL"
    ACCESS_DENIED = "ACCESS_DENIED"
    UNKNOWN_SCHEME = "UNKNOWN_SCHEME"
    MISSING_EXTRA = "MISSING_EXTRA"
    MAINTENANCE_LOST = "MAINTENANCE_LOST"
    NO_BUCKET = "NO_BUCKET"
    WRONG_REGION = "WRONG_REGION"
    CLOCK_SKEW = "CLOCK_SKEW"
    # providers
    NO_SANDBOX = "NO_SANDBOX"
    SANDBOX_UNAVAILABLE = "SANDBOX_UNAVAILABLE"
    SANDBOX_FULL = "SANDBOX_FULL"
    NOT_CAPABLE = "NOT_CAPABLE"
    WORKSPACE_BUSY = "WORKSPACE_BUSY"
    EXEC_TIMEOUT = "EXEC_TIMEOUT"
    MISSING_TOOL = "MISSING_TOOL"
    # replay
    REPLAY_DIVERGED = "REPLAY_DIVERGED"
    OPERATION_UNCERTAIN = "OPERATION_UNCERTAIN"
    # workflows
    STEP_FAILED = "STEP_FAILED"


def printable(name: bytes | str) -> str:
    """A file name as safe text for a message: control characters and undecodable bytes are escaped."""
    text = name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
    return "".join(
        ch
        if ch.isprintable()
        else ch.encode("unicode_escape", "surrogatepass").decode("ascii")
        if not "\udc80" <= ch <= "\udcff"
        else f"\\x{ord(ch) - 0xDC00:02x}"
        for ch in text
    )


class SnapcoreError(Exception):
    """Base of all errors. `code` is stable, `hint` says what to do, `retryable` whether trying again can help."""

    default_code = Code.INVALID_REQUEST
    retryable = False

    def __init__(self, message: str, *, code: Code | None = None, hint: str = "", retryable: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.hint = hint
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class CheckpointConflictError(SnapcoreError):
    """The thread is not as the caller thought: stale head, wrong parent, taken id, destination not empty."""

    default_code = Code.STALE_HEAD
    retryable = True


class CheckpointWriterConflictError(SnapcoreError):
    """Another writer holds this thread's lease; `expires_at` is microseconds since the epoch, by the database's clock."""

    default_code = Code.WRITER_HELD
    retryable = True

    def __init__(self, message: str, *, holder: str = "", expires_at: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.holder = holder
        self.expires_at = expires_at


class CheckpointWriterLostError(SnapcoreError):
    """This writer's lease expired, was released or was taken over. The head has not moved on its account."""

    default_code = Code.WRITER_LOST
    retryable = True


class RecordsMissingError(SnapcoreError):
    """A commit refers to stored records that are gone; nothing was committed. `ids` names them (32 bytes each)."""

    default_code = Code.RECORDS_MISSING
    retryable = True

    def __init__(self, message: str, *, ids: Iterable[bytes]) -> None:
        super().__init__(message)
        self.ids = frozenset(ids)


class SnapshotError(SnapcoreError):
    """A workspace, checkpoint or request that cannot be captured or restored; `paths` names every offending path."""

    def __init__(
        self,
        message: str,
        *,
        code: Code,
        paths: Sequence[bytes] = (),
        hint: str = "",
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint, retryable=retryable)
        self.paths = tuple(paths)


class RepositoryError(SnapcoreError):
    """The repository is absent, foreign, damaged, full or out of reach."""

    default_code = Code.STORE_UNAVAILABLE


class ProviderError(SnapcoreError):
    """The sandbox is absent, unreachable, full, busy, or lacks an ability that the request needs."""

    default_code = Code.SANDBOX_UNAVAILABLE


class ReplayDivergedError(SnapcoreError):
    """The operation asked for is not the one recorded at this place, or may have been done already; nothing was consumed."""

    default_code = Code.REPLAY_DIVERGED


class StepFailedError(SnapcoreError):
    """A command of a workflow ended with an exit code that is not allowed. `step` is its number, from 1; `stderr` what it wrote
    there, without secrets."""

    default_code = Code.STEP_FAILED

    def __init__(self, message: str, *, step: int, exit_code: int, stderr: bytes = b"", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.step = step
        self.exit_code = exit_code
        self.stderr = stderr
