"""A stream gives the same as the whole file, whatever the pieces, and holds little back."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapcore import redaction_stream
from snapcore.errors import Code, SnapshotError
from snapcore.model import Redaction
from snapcore.protocols import Buffer
from snapcore.redaction import RedactionHook, RedactionPattern, Redactor

SECRETS = {"A": "abcabcab", "B": b"\x00\x01\x02\x00\x01\x02", "C": "bcabcaba", "D": "aaaaaa"}
PARTS = [b"abcabcab", b"abcab", b"YWJjYWJjYWI", b"FiY2FiY2Fi", b"hYmNhYmNhY", b"aaaa", b"\0\1\2", b"616263616263", b"zz", b"-"]


def streamed(redactor: Redactor, data: bytes, cuts: list[int]) -> tuple[bytes, tuple[Redaction, ...]]:
    stream = redactor.stream(b"f")
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    out = b"".join([stream.feed(data[a:b]) for a, b in itertools.pairwise(edges)]) + stream.finish()
    return out, stream.redactions


def hook(path: str, block: bytes) -> list[tuple[int, int]]:
    """Looks further ahead, and reaches further back, than it states: the cut of the stream must not matter even so."""
    return [(max(0, match.start() - 5), match.end()) for match in re.finditer(rb"z[a-z]{0,4}-(?=.{8})", block, re.DOTALL)]


contents = st.lists(st.sampled_from(PARTS), max_size=30).map(b"".join)
split_points = st.lists(st.integers(0, 1000), max_size=8)


@settings(deadline=None)
@given(contents, split_points)
def test_any_split_gives_the_same_as_the_whole(data: bytes, cuts: list[int]) -> None:
    redactor = Redactor.build(SECRETS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redaction_stream, "_STEP", 1)
        out, records = streamed(redactor, data, cuts)
    expected, expected_records = redactor.redact(b"f", data)
    assert out == bytes(expected)
    assert records == expected_records
    back, left = redactor.reinject(records, 0, out)
    assert all(record.form.endswith("/x") for record in left)  # base64 of secrets side by side
    assert left or bytes(back) == data
    assert all(new in (old, 0) for new, old in zip(back, data, strict=True))


@settings(deadline=None)
@given(contents, split_points)
def test_any_split_gives_the_same_with_hooks_and_patterns(data: bytes, cuts: list[int]) -> None:
    redactor = Redactor.build(
        SECRETS,
        hooks=[RedactionHook("hook", "1", hook, max_match=6)],
        patterns=[RedactionPattern("pattern", rb"b[zc-]{1,5}", max_match=6)],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redaction_stream, "WINDOW", 16)
        patch.setattr(redaction_stream, "_STEP", 1)
        out, records = streamed(redactor, data, cuts)
        expected, expected_records = redactor.redact(b"f", data)
    assert out == bytes(expected)
    assert records == expected_records
    covered = bytearray(data)
    for record in records:
        covered[record.offset : record.offset + record.length] = bytes(record.length)
    assert out == covered


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300_000), st.lists(st.integers(0, 700_000), max_size=5))
def test_secrets_at_the_borders_of_large_pieces_are_found(offset: int, cuts: list[int]) -> None:
    redactor = Redactor.build({"TOKEN": "AKIAIOSFODNN7EXAMPLE"}, patterns=[RedactionPattern("card", r"\d{16}", 16)])
    data = bytearray(b"." * 700_000)
    for at in (offset, 262_144 - 7, 524_288 - 19, 700_000 - 20):
        data[at : at + 20] = b"AKIAIOSFODNN7EXAMPLE"
    data[524_288 + 3 : 524_288 + 19] = b"1234567890123456"
    data[300_030:300_046] = b"1234567890123456"
    out, records = streamed(redactor, bytes(data), cuts)
    whole, whole_records = redactor.redact(b"f", data)
    assert out == whole
    assert records == whole_records
    assert b"AKIAIOSFODNN7EXAMPLE" not in out
    assert b"1234567890123456" not in out


def test_little_is_held_back() -> None:
    redactor = Redactor.build({"TOKEN": "x" * 3000})
    stream = redactor.stream(b"f")
    fed = released = 0
    for _ in range(200):
        released += len(stream.feed(b"y" * 50_000))
        fed += 50_000
        assert fed - released < 150_000
    assert released + len(stream.finish()) == fed


def test_a_pattern_is_found_across_the_border_of_two_windows() -> None:
    redactor = Redactor.build(patterns=[RedactionPattern("key", rb"sk-[a-f]{40}", max_match=43)])
    for offset in range(redaction_stream.WINDOW - 44, redaction_stream.WINDOW + 2):
        data = b"." * offset + b"sk-" + b"abcdef" * 6 + b"abcd" + b"." * 100
        out, records = redactor.redact(b"f", data)
        assert records == (Redaction(offset, 43, "key", "pattern"),)
        assert bytes(out) == b"." * offset + bytes(43) + b"." * 100


def test_what_a_window_finds_just_before_its_core_was_not_released_yet() -> None:
    redactor = Redactor.build(hooks=[RedactionHook("hook", "1", hook, max_match=6)])
    at = redaction_stream.WINDOW
    data = b"." * at + b"z-" + b"." * 20
    out, records = streamed(redactor, data, [at + 6])
    assert records == (Redaction(at - 5, 7, "hook", "hook"),)
    assert out == b"." * (at - 5) + bytes(7) + b"." * 20
    assert redactor.redact(b"f", data) == (out, records)


def test_what_lies_only_in_the_margin_of_a_window_does_not_count() -> None:
    redactor = Redactor.build(patterns=[RedactionPattern("start", rb"\A.", max_match=16)])
    records = redactor.redact(b"f", b"." * (2 * redaction_stream.WINDOW))[1]
    assert records == (Redaction(0, 1, "start", "pattern"),)


def test_a_hook_may_return_a_changed_block() -> None:
    def blank(path: str, block: bytes) -> bytes:
        return re.sub(rb"pin=\d{4}", b"pin=####", block)

    redactor = Redactor.build(hooks=[RedactionHook("pins", "1", blank)])
    out, records = redactor.redact(b"f", b"a pin=1234, pin=9876" + b"." * 5000 + b"pin=5555")
    assert bytes(out) == b"a pin=\0\0\0\0, pin=\0\0\0\0" + b"." * 5000 + b"pin=\0\0\0\0"
    assert {(r.name, r.form) for r in records} == {("pins", "hook")}
    assert redactor.reinject(records, 0, out) == (bytearray(out), list(records))


def test_a_hook_gets_the_path_as_text() -> None:
    seen: list[str] = []

    def note(path: str, block: bytes) -> list[tuple[int, int]]:
        seen.append(path)
        return []

    Redactor.build(hooks=[RedactionHook("note", "1", note)]).redact(b"dir/\xff.txt", b"data")
    assert seen == ["dir/\udcff.txt"]


@pytest.mark.parametrize("result", [b"longer than the block", [(0, 99)], [(-1, 2)], [(3, 2)], None])
def test_a_hook_with_an_impossible_result_is_refused(result: Buffer | list[tuple[int, int]] | None) -> None:
    redactor = Redactor.build(hooks=[RedactionHook("bad", "1", lambda path, block: result)])  # type: ignore[arg-type,return-value]
    with pytest.raises(SnapshotError) as caught:
        redactor.redact(b"f", b"block")
    assert caught.value.code == Code.INVALID_REQUEST
    assert "bad" in str(caught.value)


def test_what_a_hook_finds_beside_a_secret_does_not_keep_the_secret_from_coming_back() -> None:
    redactor = Redactor.build({"T": "token-value"}, patterns=[RedactionPattern("line", rb"<[^>]*>", 64)])
    out, records = redactor.redact(b"f", b"a <x token-value y> b")
    assert bytes(out) == b"a " + bytes(17) + b" b"
    assert [(r.offset, r.length, r.name) for r in records] == [(2, 3, "line"), (5, 11, "T"), (16, 3, "line")]
    assert bytes(redactor.reinject(records, 0, out)[0]) == b"a \0\0\0token-value\0\0\0 b"
