"""What errors say and carry. The tree and the codes are pinned in test_project.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapcore import errors
from snapcore.errors import (
    CheckpointConflictError,
    CheckpointWriterConflictError,
    CheckpointWriterLostError,
    Code,
    ProviderError,
    RecordsMissingError,
    ReplayDivergedError,
    RepositoryError,
    SnapcoreError,
    SnapshotError,
    printable,
)


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (CheckpointConflictError("m"), Code.STALE_HEAD, True),
        (CheckpointWriterConflictError("m"), Code.WRITER_HELD, True),
        (CheckpointWriterLostError("m"), Code.WRITER_LOST, True),
        (RecordsMissingError("m", ids=[]), Code.RECORDS_MISSING, True),
        (RepositoryError("m"), Code.STORE_UNAVAILABLE, False),
        (ProviderError("m"), Code.SANDBOX_UNAVAILABLE, False),
        (ReplayDivergedError("m"), Code.REPLAY_DIVERGED, False),
        (SnapshotError("m", code=Code.TORN_READ), Code.TORN_READ, False),
    ],
)
def test_each_error_has_a_code_and_says_whether_a_retry_can_help(error: SnapcoreError, code: Code, retryable: bool) -> None:
    assert (error.code, error.retryable) == (code, retryable)


def test_code_hint_and_retry_may_be_given() -> None:
    error = RepositoryError("Gone.", code=Code.READ_ONLY, hint="Look.", retryable=True)
    assert (str(error), error.message, error.hint) == ("Gone. Look.", "Gone.", "Look.")
    assert (error.code, error.retryable) == (Code.READ_ONLY, True)
    assert not RepositoryError.retryable
    assert not CheckpointConflictError("m", retryable=False).retryable


def test_without_a_hint_the_message_stands_alone() -> None:
    assert str(ProviderError("The sandbox is gone.")) == "The sandbox is gone."


def test_errors_carry_what_a_handler_needs() -> None:
    assert SnapshotError("m", code=Code.INVALID_PATH, paths=[b"a", b"b"]).paths == (b"a", b"b")
    assert SnapshotError("m", code=Code.INVALID_PATH).paths == ()
    assert RecordsMissingError("m", ids=[b"1", b"2", b"1"]).ids == {b"1", b"2"}
    held = CheckpointWriterConflictError("m", holder="process 1 on a", expires_at=5)
    assert (held.holder, held.expires_at) == ("process 1 on a", 5)


def test_a_code_is_its_own_text() -> None:
    assert Code.STALE_HEAD == "STALE_HEAD"
    assert f"{Code.STALE_HEAD}" == "STALE_HEAD"
    assert Code("INVALID_BLOB") is Code.INVALID_BLOB


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n.endswith("Error")])
def test_one_base_catches_every_error(name: str) -> None:
    assert issubclass(getattr(errors, name), SnapcoreError)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"plain/name.txt", "plain/name.txt"),
        ("naïve 文".encode(), "naïve 文"),
        (b"new\nline", "new\\nline"),
        (b"bell\x07", "bell\\x07"),
        (b"\x1b[31mred", "\\x1b[31mred"),
        (b"caf\xe9", "caf\\xe9"),
        ("\u202eback", "\\u202eback"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("lone \ud800", "lone \\ud800"),
        ("from os \udcff", "from os \\xff"),
        ("", ""),
    ],
)
def test_names_are_shown_without_what_a_terminal_would_obey(name: bytes | str, shown: str) -> None:
    assert printable(name) == shown


@given(st.binary(max_size=30) | st.text(st.characters(), max_size=30))
def test_any_name_can_be_shown_and_printed(name: bytes | str) -> None:
    shown = printable(name)
    assert shown.isprintable()
    shown.encode("utf-8")
