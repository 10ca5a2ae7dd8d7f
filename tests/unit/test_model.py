"""The values: order of paths, valid names and ids, totals, and checkpoint records."""

import datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapcore.errors import Code, SnapshotError
from snapcore.model import (
    MAX_ID_BYTES,
    Checkpoint,
    ContentRef,
    Entry,
    Holder,
    Kind,
    PolicyRecord,
    Redaction,
    RootState,
    Skipped,
    Totals,
    path_key,
    relabelled,
    validate_id,
    validate_path,
    validate_thread_id,
)

names = st.binary(min_size=1, max_size=4).filter(lambda n: b"/" not in n and b"\0" not in n)
paths = st.lists(names, min_size=1, max_size=4).map(b"/".join)


def refusal(check: object, value: object) -> Code:
    assert callable(check)
    with pytest.raises(SnapshotError) as error:
        check(value)
    return error.value.code


# ---- paths


@settings(max_examples=200, deadline=None)
@given(st.lists(paths, max_size=20))
def test_path_order_is_the_order_of_a_walk_by_depth(found: list[bytes]) -> None:
    """A walk visits a folder's children by name, and all below a child before the next one."""
    assert sorted(found, key=path_key) == sorted(found, key=lambda path: path.split(b"/"))


def test_what_lies_in_a_folder_is_one_run_right_behind_it() -> None:
    found = [b"a", b"a!", b"a-b", b"a.b", b"a/b", b"a/b/c", b"a0", b""]
    assert sorted(found, key=path_key) == [b"", b"a", b"a/b", b"a/b/c", b"a!", b"a-b", b"a.b", b"a0"]


@pytest.mark.parametrize("path", [b"", b"a", b"a/b", b"...", b"..a", b".a", b"a..", b"\xff\n", b" ", b"\\", b"a" * 5000])
def test_plain_relative_paths_are_valid(path: bytes) -> None:
    validate_path(path)


@pytest.mark.parametrize("path", [b"/", b"/a", b"a/", b"a//b", b".", b"..", b"a/.", b"./a", b"a/../b", b"..//", b"a\0", b"\0"])
def test_a_path_that_could_lead_out_of_a_root_is_refused(path: bytes) -> None:
    with pytest.raises(SnapshotError) as error:
        validate_path(path)
    assert error.value.code == Code.INVALID_PATH
    assert error.value.paths == (path,)


# ---- ids


@pytest.mark.parametrize("check", [validate_id, validate_thread_id])
@pytest.mark.parametrize(
    "value", ["a", "x" * MAX_ID_BYTES, "é" * (MAX_ID_BYTES // 2), "a b", "näme-文", "'; drop table", "%", "-"]
)
def test_any_printed_text_is_an_id(check: object, value: str) -> None:
    assert callable(check)
    check(value)


@pytest.mark.parametrize("check", [validate_id, validate_thread_id])
@pytest.mark.parametrize(
    "value",
    ["", None, 5, b"bytes", "x" * (MAX_ID_BYTES + 1), "é" * (MAX_ID_BYTES // 2) + "x", "a\n", "\0", "\x7f", "\x1b[0m", "\ud800"],
)
def test_what_is_no_text_or_too_long_or_hidden_is_no_id(check: object, value: object) -> None:
    assert refusal(check, value) == Code.INVALID_ID


@pytest.mark.parametrize("value", ["a/b", "a:b", "label:x", "latest", "/", ":"])
def test_a_checkpoint_id_cannot_be_taken_for_another_way_to_name_one(value: str) -> None:
    assert refusal(validate_id, value) == Code.INVALID_ID
    validate_thread_id(value)


# ---- values


def root(name: str, **totals: int) -> RootState:
    return RootState(name, "/" + name, bytes(32), bytes(32), totals=Totals(**totals))


def test_the_totals_of_a_checkpoint_are_those_of_all_roots() -> None:
    parts = (root("a", files=1, folders=2, links=3, bytes=4), root("b", files=10, folders=20, links=30, bytes=40))
    assert Checkpoint(id="c", thread_id="t", roots=parts).totals == Totals(11, 22, 33, 44)
    assert Checkpoint(id="c", thread_id="t").totals == Totals()


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (0, "1970-01-01T00:00:00+00:00"),
        (1_700_000_000_123_457, "2023-11-14T22:13:20.123457+00:00"),
        (253_402_300_799_999_999, "9999-12-31T23:59:59.999999+00:00"),
    ],
)
def test_the_time_of_a_checkpoint_is_exact_and_aware(micros: int, text: str) -> None:
    created = Checkpoint(id="c", thread_id="t", created_at=micros).created
    assert created.isoformat() == text
    assert created.utcoffset() == datetime.timedelta(0)


@pytest.mark.parametrize(
    ("reason", "label", "expected"),
    [
        ("automatic", "x", "named"),
        ("named", None, "automatic"),
        ("named", "y", "named"),
        ("fork-root", "x", "fork-root"),
        ("rewind", None, "rewind"),
    ],
)
def test_a_label_makes_a_checkpoint_named_but_does_not_hide_how_it_came_about(
    reason: str, label: str | None, expected: str
) -> None:
    changed = relabelled(Checkpoint(id="c", thread_id="t", reason=reason, label="old"), label)
    assert (changed.label, changed.reason, changed.id) == (label, expected, "c")


def test_a_holder_names_its_process_when_it_is_known() -> None:
    assert Holder("host", 5).describe() == "process 5 on host"
    assert Holder().describe() == "another writer"


def test_chunk_ids_are_cut_from_their_concatenation() -> None:
    assert Entry(b"f", Kind.FILE, chunks=b"a" * 32 + b"b" * 32).chunk_ids() == [b"a" * 32, b"b" * 32]
    assert Entry(b"f", Kind.FILE).chunk_ids() == []


# ---- checkpoint records

FULL = Checkpoint(
    id="c",
    thread_id="t",
    parent_id="p",
    created_at=1,
    reason="rewind",
    label="l",
    run_id="r",
    step=3,
    roots=(
        RootState(
            "w", "/w", b"m" * 32, b"c" * 32, PolicyRecord(exclude=("*.o",)), Totals(1, 2, 3, 4), (Skipped(b"x\xff", "mount"),)
        ),
    ),
    content_id=b"c" * 32,
    conversation=ContentRef(4, b"i" * 32, b"", (Redaction(0, 2, "T", "raw"),)),
    artifacts={"a": ContentRef(1, b"", b"l" * 32)},
    warnings=("w",),
    redaction=b"f" * 32,
    idempotency_key="k",
    source_thread_id="s",
    source_id="o",
    deleted=("d",),
    record_id=b"",
)
decoder = msgspec.msgpack.Decoder(Checkpoint)


def test_a_checkpoint_record_is_a_map_by_name_with_what_the_format_says() -> None:
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(FULL))
    assert list(record) == [
        *("id", "thread_id", "parent_id", "created_at", "reason", "label", "run_id", "step", "roots", "content_id"),
        *("conversation", "artifacts", "warnings", "redaction", "idempotency_key", "source_thread_id", "source_id"),
        *("deleted", "record_id", "revision", "recovered"),
    ]
    assert list(record["roots"][0]) == ["name", "path", "manifest", "content_id", "policy", "totals", "skipped"]
    assert record["roots"][0]["skipped"] == [[b"x\xff", "mount"]]
    assert record["conversation"] == [4, b"i" * 32, b"", [[0, 2, "T", "raw"]]]
    assert decoder.decode(msgspec.msgpack.encode(FULL)) == FULL


def test_a_record_of_an_older_or_newer_writer_is_readable() -> None:
    assert decoder.decode(msgspec.msgpack.encode({"id": "c", "thread_id": "t"})) == Checkpoint(id="c", thread_id="t")
    newer = {**msgspec.msgpack.decode(msgspec.msgpack.encode(FULL)), "a field to come": [1, {"x": None}]}
    assert decoder.decode(msgspec.msgpack.encode(newer)) == FULL


def test_a_record_cut_short_anywhere_is_refused() -> None:
    raw = msgspec.msgpack.encode(FULL)
    for length in range(len(raw)):
        with pytest.raises(msgspec.MsgspecError):
            decoder.decode(raw[:length])


def test_a_bit_flipped_anywhere_in_a_record_gives_a_checkpoint_or_is_refused() -> None:
    """The record's id finds every flip before it is decoded; this is about decoding alone."""
    raw = msgspec.msgpack.encode(FULL)
    found = []
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found.append(isinstance(decoder.decode(damaged), Checkpoint))
        except msgspec.MsgspecError:
            found.append(True)
    assert all(found)
