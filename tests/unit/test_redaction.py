"""What redaction finds in contents, in which forms, and what comes back."""

import base64
import json
import urllib.parse

import pytest

from snapcore.model import Redaction
from snapcore.redaction import NO_REDACTION, Redactor, zeroed

TOKEN = "ghp_Zk3/pq+Y8w~vb\"N'é <&>\\x"
PLAIN = "AKIAIOSFODNN7EXAMPLE"
BINARY = b"\xff\x00\x01\x80secret\xfe\n"


def written(value: str) -> list[str]:
    """A text as tools write it, made without the code under test."""
    raw = value.encode()
    percent = "".join(f"%{byte:02X}" for byte in raw)
    lower = urllib.parse.quote(value, safe="")
    for escape in {lower[i : i + 3] for i in range(len(lower)) if lower[i] == "%"}:
        lower = lower.replace(escape, escape.lower())
    return [
        value,
        raw.hex(),
        raw.hex().upper(),
        urllib.parse.quote(value),
        urllib.parse.quote(value, safe=""),
        urllib.parse.quote_plus(value),
        urllib.parse.urlencode({"": value})[1:],
        urllib.parse.quote(value, safe="!*'()"),
        lower,
        percent,
        percent.lower(),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        json.dumps(value)[1:-1].replace("/", "\\/"),
        json.dumps(value)[1:-1].replace("<", "\\u003c").replace("&", "\\u0026").replace(">", "\\u003e"),
        json.dumps(json.dumps(value))[3:-3],
    ]


def masked(data: bytes, secret: bytes) -> bytes:
    return data.replace(secret, bytes(len(secret)))


@pytest.mark.parametrize("value", [TOKEN, PLAIN, "pässwörd✓"])
def test_every_written_form_is_zeroed_and_comes_back(value: str) -> None:
    redactor = Redactor.build({"TOKEN": value})
    for form in written(value):
        needle = form.encode()
        for before in (b"", b"x", b'{"k": "', b"\0" * 70):
            data = before + needle + b'", tail'
            out, records = redactor.redact(b"f", data)
            assert bytes(out) == masked(data, needle), form
            assert [(r.offset, r.length, r.name) for r in records] == [(len(before), len(needle), "TOKEN")]
            back, left = redactor.reinject(records, 0, out)
            assert bytes(back) == data
            assert left == []


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
@pytest.mark.parametrize("value", [TOKEN.encode(), PLAIN.encode(), BINARY, b"\xfb\xff\xfe\xfb\xef\xbe\xfb\xef"])
def test_base64_is_zeroed_at_every_alignment_with_each_character_that_holds_a_bit_of_the_secret(encode, value) -> None:  # type: ignore[no-untyped-def]
    redactor = Redactor.build({"TOKEN": value})
    for before in (b"", b"u", b"u:", b"usr", b"user", b"\xff\xff\xff\xff\xff"):
        for after in (b"", b"\n", b":p", b"pas", b"\xff\xff\xff\xff"):
            data = encode(before + value + after)
            out, records = redactor.redact(b"f", data)
            first, last = 8 * len(before) // 6, -(-8 * (len(before) + len(value)) // 6)
            assert bytes(out) == data[:first] + bytes(last - first) + data[last:]
            back, left = redactor.reinject(records, 0, out)
            assert bytes(back) == data
            assert left == []


def test_base64_stays_readable_around_the_secret() -> None:
    redactor = Redactor.build({"TOKEN": PLAIN})
    out, records = redactor.redact(b"f", b"Authorization: Basic " + base64.b64encode(b"user:" + PLAIN.encode()))
    assert bytes(out).startswith(b"Authorization: Basic dXNlc")
    assert records[0].form.startswith("base64/2")


def test_the_border_bits_of_two_neighbouring_secrets_are_not_recorded() -> None:
    redactor = Redactor.build({"A": "first-secret-1", "B": "second-secret"})
    data = base64.b64encode(b"first-secret-1second-secret")
    out, records = redactor.redact(b"f", data)
    assert set(bytes(out)) <= {0, ord("=")}
    assert [r.form for r in records] == ["base64/0/x", "base64/2/x"]
    assert redactor.reinject(records, 0, out) == (bytearray(out), list(records))


def test_a_match_is_found_at_every_offset_of_a_buffer() -> None:
    redactor = Redactor.build([PLAIN])
    for offset in range(70):
        data = b"-" * offset + PLAIN.encode() + b"-" * 5
        assert redactor.redact(b"f", data)[1] == (Redaction(offset, len(PLAIN), "secret-1", "raw"),)


def test_overlapping_and_contained_secrets_are_all_covered_and_come_back() -> None:
    redactor = Redactor.build({"LEFT": "abcdefgh", "RIGHT": "efghijkl", "INNER": "bcdefg", "OUTER": "xxabcdefgh"})
    data = b"..xxabcdefghijkl..abcdefgh..bcdefg"
    out, records = redactor.redact(b"f", data)
    assert bytes(out) == b".." + bytes(14) + b".." + bytes(8) + b".." + bytes(6)
    assert [(r.offset, r.length, r.name) for r in records] == [
        (2, 10, "OUTER"),
        (8, 8, "RIGHT"),
        (18, 8, "LEFT"),
        (28, 6, "INNER"),
    ]
    assert redactor.reinject(records, 0, out) == (bytearray(data), [])


def test_a_secret_that_overlaps_itself_is_covered_whole_with_few_records() -> None:
    redactor = Redactor.build(["aaaaaa", "abcabca"])
    data = b"x" + b"a" * 10_001 + b"y" + b"abcabcabcabcabc" + b"z"
    out, records = redactor.redact(b"f", data)
    assert bytes(out) == b"x" + bytes(10_001) + b"y" + bytes(13) + b"bcz"
    assert len(records) <= 5
    assert redactor.reinject(records, 0, out) == (bytearray(data), [])


def test_binary_secrets_and_secrets_longer_than_an_anchor_are_compared_whole() -> None:
    long = bytes(range(1, 256)) * 4
    redactor = Redactor.build({"B": BINARY, "L": long})
    data = b"a" + BINARY + long[:-1] + b"?" + long
    out, records = redactor.redact(b"f", data)
    assert [(r.offset, r.length, r.name) for r in records] == [(1, len(BINARY), "B"), (len(data) - len(long), len(long), "L")]
    assert bytes(out) == b"a" + bytes(len(BINARY)) + long[:-1] + b"?" + bytes(len(long))


def test_white_space_around_a_text_value_is_no_part_of_the_secret() -> None:
    redactor = Redactor.build({"TOKEN": PLAIN + "\n", "OTHER": b" bytes-value\r\n"})
    assert bytes(redactor.redact(b"f", f"{PLAIN}; bytes-value".encode())[0]) == bytes(20) + b"; " + bytes(11)


def test_a_buffer_without_secrets_is_returned_as_it_is() -> None:
    redactor = Redactor.build([PLAIN])
    for data in (b"", b"nothing here", bytearray(b"x" * 1_000_000)):
        out, records = redactor.redact(b"f", data)
        assert out is data
        assert records == ()


def test_many_files_are_redacted_each_on_its_own() -> None:
    redactor = Redactor.build({"TOKEN": PLAIN})
    half = PLAIN.encode()[:10], PLAIN.encode()[10:]
    items = [(b"a", half[0]), (b"b", half[1]), (b"c", b"=" + PLAIN.encode()), (b"d", b"")]
    assert [(bytes(out), len(records)) for out, records in redactor.redact_many(items)] == [
        (half[0], 0),
        (half[1], 0),
        (b"=" + bytes(20), 1),
        (b"", 0),
    ]


def test_without_secrets_nothing_is_done() -> None:
    for redactor in (NO_REDACTION, Redactor.build(), Redactor.build({}), Redactor.build([])):
        assert not redactor.active
        data = b"data"
        assert redactor.redact(b"f", data)[0] is data
        assert redactor.redact_many([(b"f", data)]) == [(data, ())]
        assert redactor.scrub_text("text") == "text"
        assert redactor.names_with_secrets([(b"name", b"target")]) == {}
        assert redactor.fingerprint(b"salt") == b""
        stream = redactor.stream(b"f")
        assert stream.feed(data) + stream.finish() == data


def test_a_rotated_value_of_equal_length_is_put_back_and_others_stay_zero() -> None:
    old = Redactor.build({"SAME": "old-value-1", "LONGER": "old-value-2", "GONE": "old-value-3"})
    new = Redactor.build({"SAME": "new-value-1", "LONGER": "longer-new-value"})
    data = b"old-value-1 old-value-2 old-value-3 " + b"old-value-1".hex().encode()
    out, records = old.redact(b"f", data)
    back, left = new.reinject(records, 0, out)
    assert bytes(back) == b"new-value-1 " + bytes(11) + b" " + bytes(11) + b" " + b"new-value-1".hex().encode()
    assert [record.name for record in left] == ["LONGER", "GONE"]


def test_values_that_disagree_where_their_records_overlap_are_not_mixed() -> None:
    old = Redactor.build({"A": "abcdefgh", "B": "efghijkl"})
    new = Redactor.build({"A": "12345678", "B": "56790000"})
    out, records = old.redact(b"f", b"abcdefghijkl")
    back, left = new.reinject(records, 0, out)
    assert bytes(back) == b"12345678" + bytes(4)
    assert [record.name for record in left] == ["B"]
    assert b"".join(new.reinject(records, at, out[at : at + 3])[0] for at in range(0, 12, 3)) == bytes(back)


@pytest.mark.parametrize("block", [1, 3, 7, 64])
def test_blocks_of_any_size_are_put_back_and_zeroed_as_the_whole(block: int) -> None:
    redactor = Redactor.build({"A": "abcdefgh", "B": "efghijkl", "C": "aaaaaa"})
    data = b"..abcdefghijkl" + b"a" * 40 + base64.b64encode(b"0abcdefgh0") + b"!"
    out, records = redactor.redact(b"f", data)
    cuts = range(0, len(data), block)
    assert b"".join(redactor.reinject(records, at, out[at : at + block])[0] for at in cuts) == data
    assert b"".join(zeroed(data[at : at + block], at, records) for at in cuts) == bytes(out)


def test_zeroing_a_live_file_equals_its_redacted_copy_only_when_the_rest_is_equal() -> None:
    redactor = Redactor.build({"A": PLAIN})
    data = f"key={PLAIN}\nother=1\n".encode()
    out, records = redactor.redact(b"f", data)
    assert zeroed(data, 0, records) == out
    assert zeroed(data.replace(b"=1", b"=2"), 0, records) != out
    assert zeroed(data, 0, ()) is data


def test_names_and_link_targets_that_hold_a_secret_are_found_in_any_form() -> None:
    redactor = Redactor.build({"ONE": PLAIN, "TWO": "slash/ed-value"})
    items = [
        (b"dir/x-" + PLAIN.encode() + b".txt", b""),
        (b"a/slash/ed-value", b""),
        (b"link", b"../" + base64.b64encode(b"x" + PLAIN.encode())),
        (b"harmless", b"target"),
    ]
    assert redactor.names_with_secrets(items) == {0: "ONE", 1: "TWO", 2: "ONE"}
    halves = PLAIN.encode()[:10], PLAIN.encode()[10:]
    items = [(b"plain", b""), halves, (b"", b""), (b"x", PLAIN.encode()), (PLAIN.encode(), b"")]
    assert redactor.names_with_secrets(items) == {3: "ONE", 4: "ONE"}


def test_a_secret_with_a_zero_byte_is_not_found_across_two_names() -> None:
    redactor = Redactor.build({"B": b"left\0right"})
    assert redactor.names_with_secrets([(b"left", b"right"), (b"left", b""), (b"right", b"")]) == {}
