"""What a checkpoint store refuses before it touches anything. Shared by every store; nothing here does I/O."""

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from snapcore.errors import Code, SnapshotError
from snapcore.ledger import MAX_INLINE_OUTPUT, Claim, Event, EventKind, Output
from snapcore.model import DIGEST_BYTES, Checkpoint, ContentRef, PackWrite, validate_id, validate_text, validate_thread_id
from snapcore.protocols import Commit

__all__ = [
    "REASONS",
    "check_checkpoint",
    "check_commit",
    "check_event",
    "check_idempotency_key",
    "check_label",
    "check_pack",
    "check_pack_id",
    "check_page",
    "check_record_ids",
    "microseconds",
]

REASONS: Final = frozenset({"automatic", "named", "fork-root", "rewind"})
_PACK_ID: Final = re.compile(r"[0-9a-f]{32}")
_RANDOM_ID: Final = re.compile(r"[0-9a-f]{32}")
_KINDS: Final = frozenset(kind for name, kind in vars(EventKind).items() if name.isupper())
_MAX_NUMBER: Final = 2**63 - 1

_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(Event)


def _invalid(what: str, entry: str = "checkpoint") -> SnapshotError:
    return SnapshotError(f"Not a valid {entry} entry: {what}.", code=Code.INVALID_ENTRY)


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


def check_commit(commit: Commit, thread_id: str, checkpoint_id: str) -> None:
    """Refuse a commit whose ids cannot be right, or whose event is not of this checkpoint of this thread."""
    _check_parts(commit)
    if commit.event is None:
        return
    claim, event = commit.event
    check_event(claim, event, None)
    if claim.thread_id != thread_id or event.checkpoint_id != checkpoint_id:
        raise _invalid("the event of its commit is not about it")


def check_event(claim: Claim, event: Event, commit: Commit | None) -> None:
    """Refuse (`INVALID_ENTRY`) an event that could not be read back as it is, or whose outputs cannot be right: stored ones need
    the commit that enters them. `INVALID_ID` for the claim's thread, `INVALID_REQUEST` for such a commit."""
    validate_thread_id(claim.thread_id)
    _check_readable(event)
    for what, value in (("its id", event.id), ("the event it completes", event.started_id), ("what it reruns", event.reruns)):
        if value is not None and not _RANDOM_ID.fullmatch(value):
            raise _invalid(f"{what} must be 32 hex digits", "event")
    if event.kind not in _KINDS:
        raise _invalid(f"the kind must be one of {', '.join(sorted(_KINDS))}", "event")
    if event.sandbox_id:
        validate_text(event.sandbox_id, "A sandbox id", code=Code.INVALID_ENTRY)
    if event.checkpoint_id is not None:
        validate_id(event.checkpoint_id)
    if event.step is not None:
        _check_number(event.step, "the step")
    if event.kind == EventKind.RESUMED and event.continues is None:
        raise _invalid("a resumed sandbox continues a line of work", "event")
    for point in (event.continues, event.drops):
        if point is not None:
            validate_thread_id(point.thread_id)
            _check_number(point.sequence, "a place in a ledger")
    for output in (event.stdout, event.stderr):
        _check_output(output, stored=commit is not None)
    if commit is not None:
        _check_parts(commit)
        if commit.event is not None:
            raise SnapshotError("The commit of an event has no event of its own.", code=Code.INVALID_REQUEST)


def _check_readable(event: Event) -> None:
    try:
        same = _events.decode(_encoder.encode(event)) == event
    except (msgspec.MsgspecError, TypeError, UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise _invalid("a field of it holds what cannot be stored", "event") from error
    if not same:
        raise _invalid("a field of it holds what cannot be stored", "event")


def _check_output(output: Output, *, stored: bool) -> None:
    _check_number(output.size, "the size of an output")
    if len(output.data) > (MAX_INLINE_OUTPUT if output.ref is None else 0):
        raise _invalid(f"an output is its bytes, up to {MAX_INLINE_OUTPUT} of them, or where they are stored", "event")
    if output.ref is not None:
        _check_content(output.ref, "an output")
        if not stored:
            raise _invalid("stored outputs need the commit that enters them", "event")


def _check_parts(commit: Commit) -> None:
    for pack in commit.packs:
        check_pack(pack)
    for pack_id in commit.own:
        check_pack_id(pack_id)
    check_record_ids(commit.refs)


def check_page(after: int, limit: int) -> None:
    """Refuse (`INVALID_REQUEST`) a page of events or runs that begins before the first, or has no room for one."""
    if not 0 <= after <= _MAX_NUMBER or not 1 <= limit <= _MAX_NUMBER:
        raise SnapshotError("A page begins after 0 or more, and holds 1 or more.", code=Code.INVALID_REQUEST)


def microseconds(seconds: float) -> int:
    """A length of time in whole microseconds. Refuses (`INVALID_REQUEST`) one that is negative, not finite or over 30 years."""
    if not 0 <= seconds < 10**9:
        raise SnapshotError("A length of time is 0 seconds or more.", code=Code.INVALID_REQUEST)
    return int(seconds * 1_000_000)
