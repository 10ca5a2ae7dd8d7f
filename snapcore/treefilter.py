"""What of a scan belongs to the checkpoint: limits, unsupported and unreadable entries, secrets in names."""

from collections.abc import Sequence
from typing import Final

from .errors import Code, SnapshotError, printable
from .model import FileStat, Kind, Note, Skipped
from .redaction import Redactor
from .selection import FilePolicy, Selection

__all__ = ["TreeFilter", "left_out"]

SHOWN_PATHS: Final = 20
EARLIEST_NS: Final = -(2**63)
LATEST_NS: Final = 2**63 - 1
_NOTES: Final = {Note.MOUNT: "another file system is mounted here", Note.UNREADABLE: "unreadable"}


class _Refusal:
    """Paths refused for one reason, and the error that names them."""

    def __init__(self, code: Code, what: str, hint: str) -> None:
        self.code = code
        self.what = what
        self.hint = hint
        self.paths: list[tuple[bytes, str]] = []

    def error(self) -> SnapshotError:
        shown = ", ".join(f"{printable(p)} ({why})" for p, why in self.paths[:SHOWN_PATHS])
        more = f", and {len(self.paths) - SHOWN_PATHS} more" if len(self.paths) > SHOWN_PATHS else ""
        return SnapshotError(f"{self.what}: {shown}{more}.", code=self.code, paths=[p for p, _ in self.paths], hint=self.hint)


def left_out(s: FileStat) -> str:
    """Why a checkpoint cannot hold what a scan found here; empty when it can, or when the policy excludes it."""
    if s.note == Note.EXCLUDED:
        return ""
    if s.note in _NOTES:
        return _NOTES[s.note]
    if s.note == Note.OUTSIDE or s.kind > Kind.LINK or not EARLIEST_NS <= s.mtime_ns <= LATEST_NS:
        return _unsupported(s)
    return ""


def _unsupported(s: FileStat) -> str:
    if s.note == Note.OUTSIDE:
        return "a link that leaves the workspace"
    if s.kind > Kind.LINK:
        return f"a {Kind.NAMES[s.kind]}"
    return "a modification time before 1678 or after 2262"


class TreeFilter:
    """Takes scan batches and gives back what is to be captured; remembers what is skipped and what is refused."""

    def __init__(self, policy: FilePolicy, selection: Selection, redactor: Redactor) -> None:
        self._policy = policy
        self.selection = selection
        self._redactor = redactor
        self.skipped: list[Skipped] = []
        self.files = 0
        self.bytes = 0
        self._unsupported = _Refusal(
            Code.UNSUPPORTED_ENTRY,
            "The workspace holds what a checkpoint cannot keep",
            "Exclude these paths, or set on_unsupported='skip' (--on-unsupported skip) to leave them out and list them.",
        )
        self._unreadable = _Refusal(
            Code.UNREADABLE_ENTRY,
            "The workspace holds what cannot be read",
            "Make these paths readable, exclude them, or set on_unreadable='skip' (--on-unreadable skip).",
        )
        self._limited = _Refusal(
            Code.LIMIT_EXCEEDED,
            "The workspace holds files over the limit",
            "Exclude these paths, raise max_file_bytes, or set on_limit='skip'.",
        )
        self._secret = _Refusal(
            Code.SECRET_IN_NAME, "A secret is part of a path or a link's target", "Rename or exclude these paths."
        )
        self._torn = _Refusal(
            Code.TORN_READ,
            "Files kept changing while they were read",
            "Capture when they are quiet, exclude them, or set on_torn='keep' (--on-torn keep).",
        )

    @property
    def refused(self) -> bool:
        """Whether the capture fails anyway, so that reading on is of no use."""
        return any(r.paths for r in (self._unsupported, self._unreadable, self._limited, self._secret, self._torn))

    def raise_refused(self) -> None:
        """Raise the error for the first kind of refusal that has paths."""
        for refusal in (self._secret, self._unsupported, self._unreadable, self._limited, self._torn):
            if refusal.paths:
                raise refusal.error()

    def take(self, batch: Sequence[FileStat]) -> list[FileStat]:
        """The entries of the batch to be captured, in order."""
        if self._redactor.active:
            self._look_for_secrets(batch)
        kept = [s for s in batch if not s.note and s.kind <= Kind.LINK and EARLIEST_NS <= s.mtime_ns <= LATEST_NS]
        if len(kept) != len(batch):
            for s in batch:
                if s.note or s.kind > Kind.LINK or not EARLIEST_NS <= s.mtime_ns <= LATEST_NS:
                    self._left_out(s)
        return self._limit(kept)

    def unreadable(self, path: bytes, why: str) -> None:
        """A file whose content could not be read. The reason may come from a sandbox's handle, and hold anything."""
        why = self._redactor.scrub_text(why)
        if why.startswith("vanished") or self._policy.on_unreadable == "skip":
            self.skipped.append(Skipped(path, why))
        else:
            self._unreadable.paths.append((path, why))

    def torn(self, path: bytes) -> bool:
        """A file that kept changing: whether it is kept as it was last read."""
        if self._policy.on_torn == "keep":
            return True
        self._torn.paths.append((path, "changed at every attempt"))
        return False

    def _left_out(self, s: FileStat) -> None:
        why = left_out(s)
        if not why:
            return
        if s.note == Note.MOUNT:
            self.skipped.append(Skipped(s.path, why))
        elif s.note == Note.UNREADABLE:
            self.unreadable(s.path, why)
        elif self._policy.on_unsupported == "skip":
            self.skipped.append(Skipped(s.path, why))
        else:
            self._unsupported.paths.append((s.path, why))

    def _limit(self, kept: list[FileStat]) -> list[FileStat]:
        policy = self._policy
        files = [s for s in kept if s.kind == Kind.FILE]
        size = sum(s.size for s in files)
        largest = policy.max_file_bytes
        within = (
            (largest is None or all(s.size <= largest for s in files))
            and (policy.max_files is None or self.files + len(files) <= policy.max_files)
            and (policy.max_total_bytes is None or self.bytes + size <= policy.max_total_bytes)
        )
        if within:
            self.files += len(files)
            self.bytes += size
            return kept
        return [s for s in kept if s.kind != Kind.FILE or self._within(s)]

    def _within(self, s: FileStat) -> bool:
        policy = self._policy
        if policy.max_file_bytes is not None and s.size > policy.max_file_bytes:
            why = f"{s.size} bytes, over max_file_bytes={policy.max_file_bytes}"
            if policy.on_limit == "skip":
                self.skipped.append(Skipped(s.path, why))
            else:
                self._limited.paths.append((s.path, why))
            return False
        over_files = policy.max_files is not None and self.files + 1 > policy.max_files
        over_bytes = policy.max_total_bytes is not None and self.bytes + s.size > policy.max_total_bytes
        if over_files or over_bytes:
            limit = f"max_files={policy.max_files}" if over_files else f"max_total_bytes={policy.max_total_bytes}"
            if policy.on_limit != "skip":
                raise SnapshotError(
                    f"The workspace holds more than {limit}; the limit was reached at {printable(s.path)}.",
                    code=Code.LIMIT_EXCEEDED,
                    paths=[s.path],
                    hint="Is this the right folder? Exclude what need not be kept, or raise the limit.",
                )
            self.skipped.append(Skipped(s.path, f"over {limit}"))
            return False
        self.files += 1
        self.bytes += s.size
        return True

    def _look_for_secrets(self, batch: Sequence[FileStat]) -> None:
        shown = [s for s in batch if s.note != Note.EXCLUDED]
        for place, name in self._redactor.names_with_secrets([(s.path, s.target) for s in shown]).items():
            path = shown[place].path.decode("utf-8", "surrogateescape")
            clean = self._redactor.scrub_text(path).encode("utf-8", "surrogateescape")
            self._secret.paths.append((clean, f"secret {name}"))
