"""What a checkpoint store refuses before it touches anything. Shared by every store; nothing here does I/O."""

import re
from collections.abc import Iterable
from typing import Final

from snapcore.errors import Code, SnapshotError
from snapcore.model import DIGEST_BYTES, Checkpoint, ContentRef, PackWrite, validate_id, validate_text, validate_thread_id
from snapcore.protocols import Commit

__all__ = [
    "REASONS",
    "check_checkpoint",
    "check_commit",
    "check_idempotency_key",
    "check_label",
    "check_pack",
    "check_pack_id",
    "check_record_ids",
    "microseconds",
]

REASONS: Final = frozenset({"automatic", "named", "fork-root", "rewind"})
_PACK_ID: Final = re.compile(r"[0-9a-f]{32}")
_MAX_NUMBER: Final = 2**63 - 1


def _invalid(what: str) -> SnapshotError:
    return SnapshotError(f"Not a valid checkpoint entry: {what}.", code=Code.INVALID_ENTRY)


def _check_number(value: object, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_NUMBER:
        raise _invalid(f"{what} must be a whole number that is not negative")


def _check_digest(value: object, what: str) -> None:
    if not isinstance(value, bytes) or len(value) != DIGEST_BYTES:
        raise _invalid(f"{what} must be {DIGEST_BYTES} bytes")


def _check_content(content: ContentRef, what: str) -> None:
    _check_number(content.size, f"the size of {what}")
    if len(content.chunks) % DIGEST_BYTES or len(content.chunk_list) not in (0, DIGEST_BYTES):
        raise _invalid(f"{what} must refer to records by {DIGEST_BYTES} bytes each")


def check_label(label: str | None) -> None:
    """Refuse (`INVALID_ENTRY`) a label that is empty, over 512 bytes, not valid UTF-8, or holds a control character."""
    if label is not None:
        validate_text(label, "A label", code=Code.INVALID_ENTRY)


def check_idempotency_key(key: str | None) -> None:
    """Refuse (`INVALID_ENTRY`) an idempotency key by the same rules as a label."""
    if key is not None:
        validate_text(key, "An idempotency key", code=Code.INVALID_ENTRY)


def check_checkpoint(checkpoint: Checkpoint, thread_id: str) -> None:
    """Refuse a checkpoint that is not well formed, or not of the thread that the writer holds.

    Raises `SnapshotError` with `INVALID_ID` for its ids, `INVALID_ENTRY` for all else: another thread, a time or step
    that is negative, an unknown reason, text that is empty or not valid, digests that are not 32 bytes, two roots of
    one name.
    """
    validate_id(checkpoint.id)
    validate_thread_id(checkpoint.thread_id)
    for other in (checkpoint.parent_id, checkpoint.source_id, *checkpoint.deleted):
        if other is not None:
            validate_id(other)
    if checkpoint.source_thread_id is not None:
        validate_thread_id(checkpoint.source_thread_id)
    if checkpoint.thread_id != thread_id:
        raise _invalid("its thread is not the one that the writer holds")
    if checkpoint.reason not in REASONS:
        raise _invalid(f"the reason must be one of {', '.join(sorted(REASONS))}")
    check_label(checkpoint.label)
    check_idempotency_key(checkpoint.idempotency_key)
    if checkpoint.run_id is not None:
        validate_text(checkpoint.run_id, "A run id", code=Code.INVALID_ENTRY)
    _check_number(checkpoint.created_at, "the time")
    if checkpoint.step is not None:
        _check_number(checkpoint.step, "the step")
    _check_digest(checkpoint.record_id, "the record id")
    _check_roots(checkpoint)
    _check_content(checkpoint.conversation, "the conversation")
    for name, content in checkpoint.artifacts.items():
        validate_text(name, "The name of an artifact", code=Code.INVALID_ENTRY)
        _check_content(content, "an artifact")


def _check_roots(checkpoint: Checkpoint) -> None:
    if checkpoint.roots:
        _check_digest(checkpoint.content_id, "the content id")
    names = [root.name for root in checkpoint.roots]
    if len(set(names)) != len(names):
        raise _invalid("two roots have one name")
    for root in checkpoint.roots:
        validate_text(root.name, "The name of a root", code=Code.INVALID_ENTRY)
        _check_digest(root.manifest, "the manifest of a root")
        _check_digest(root.content_id, "the content id of a root")


def check_pack_id(pack_id: str) -> None:
    """Refuse a pack id that is not 32 hex digits."""
    if not _PACK_ID.fullmatch(pack_id):
        raise SnapshotError("A pack id must be 32 hex digits.", code=Code.INVALID_REQUEST)


def check_record_ids(ids: Iterable[bytes]) -> None:
    """Refuse record ids that are not 32 bytes."""
    if not set(map(len, ids)) <= {DIGEST_BYTES}:
        raise SnapshotError(f"A record id must be {DIGEST_BYTES} bytes.", code=Code.INVALID_REQUEST)


def check_pack(pack: PackWrite) -> None:
    """Refuse a pack whose id, size or records cannot be right: a record must lie inside its pack."""
    check_pack_id(pack.pack_id)
    check_record_ids([r.id for r in pack.records])
    size = pack.size
    for r in pack.records:
        if r.offset < 0 or r.stored_size < 0 or r.raw_size < 0 or r.offset + r.stored_size > size:
            raise SnapshotError("A record does not lie inside its pack.", code=Code.INVALID_REQUEST)


def check_commit(commit: Commit) -> None:
    """Refuse a commit whose ids cannot be right."""
    for pack in commit.packs:
        check_pack(pack)
    for pack_id in commit.own:
        check_pack_id(pack_id)
    check_record_ids(commit.refs)


def microseconds(seconds: float) -> int:
    """A length of time in whole microseconds. Refuses (`INVALID_REQUEST`) one that is negative, not finite or over 30 years."""
    if not 0 <= seconds < 10**9:
        raise SnapshotError("A length of time is 0 seconds or more.", code=Code.INVALID_REQUEST)
    return int(seconds * 1_000_000)
