"""Secrets in text, JSON and errors; what is refused; fingerprints; and that no value shows anywhere."""

import base64
import copy
import json
import pickle
import random
import re
import subprocess
import time
import traceback
from typing import Any

import pytest

from snapcore.errors import Code, ProviderError, RepositoryError, SnapcoreError, SnapshotError
from snapcore.redaction import RedactionHook, RedactionPattern, Redactor

TOKEN = "ghp_Zk3/pq+Y8w~vb\"N'é <&>"
SALT = b"0123456789abcdef"


def nothing(path: str, block: bytes) -> list[tuple[int, int]]:
    return []


# ---- text


def test_every_form_in_text_becomes_the_name() -> None:
    redactor = Redactor.build({"TOKEN": TOKEN})
    forms = [TOKEN, TOKEN.encode().hex(), json.dumps(TOKEN)[1:-1], base64.b64encode(TOKEN.encode()).decode().rstrip("=")]
    for form in forms:
        assert redactor.scrub_text(f"curl -H '{form}' é") == "curl -H '{secret:TOKEN}' é"
        assert redactor.scrub_bytes(f"é {form}\n".encode()) == "é {secret:TOKEN}\n".encode()


def test_a_rotated_token_gives_the_same_text() -> None:
    old, new = Redactor.build({"T": "first-token"}), Redactor.build({"T": "a-second-longer-token"})
    assert old.scrub_text("login first-token now") == new.scrub_text("login a-second-longer-token now")


def test_each_occurrence_is_named_and_overlaps_are_covered() -> None:
    redactor = Redactor.build({"A": "abcdefgh", "B": "efghijkl"})
    assert redactor.scrub_text("abcdefghabcdefgh") == "{secret:A}{secret:A}"
    assert redactor.scrub_text("<abcdefghijkl>") == "<{secret:A}{secret:B}>"


def test_text_with_undecodable_bytes_and_lone_surrogates_is_scrubbed() -> None:
    redactor = Redactor.build({"BIN": b"\xff\xfesecret\x80", "T": "plain-token"})
    assert redactor.scrub_text("a\udcff\udcfesecret\udc80b") == "a{secret:BIN}b"
    assert redactor.scrub_text("\ud800 plain-token \udfff\udcff") == "\ud800 {secret:T} \udfff\udcff"


def test_patterns_and_hooks_hold_in_text() -> None:
    redactor = Redactor.build(
        patterns=[RedactionPattern("card", r"\d{16}", 16)],
        hooks=[RedactionHook("pin", "1", lambda path, block: [m.span() for m in re.finditer(rb"pin\d", block)])],
    )
    assert redactor.scrub_text("pay 1234567890123456 pin7") == "pay {secret:card} {secret:pin}"


def test_text_without_a_secret_is_returned_as_it_is() -> None:
    text = "nothing here é"
    assert Redactor.build(["secret-value"]).scrub_text(text) is text


# ---- JSON


def test_json_is_scrubbed_in_strings_and_keys_at_any_depth_and_not_changed_in_place() -> None:
    redactor = Redactor.build({"T": "the-token", "N": "123456789"})
    value = {"the-token": [{"a": ("x the-token", 1, 2.5, True, None)}], "id": 123456789, "n": 12}
    before = copy.deepcopy(value)
    assert redactor.redact_json(value) == {
        "{secret:T}": [{"a": ["x {secret:T}", 1, 2.5, True, None]}],
        "id": "{secret:N}",
        "n": 12,
    }
    assert value == before


def test_keys_that_become_equal_are_all_kept() -> None:
    redactor = Redactor.build({"T": "the-token"})
    value = {"the-token": 1, "{secret:T}": 2, b"the-token".hex(): 3}
    assert sorted(redactor.redact_json(value).values()) == [1, 2, 3]
    assert redactor.redact_json(value)["{secret:T}"] == 2


# ---- errors


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error)) + repr(error.args)


def test_an_error_is_scrubbed_in_all_its_texts() -> None:
    redactor = Redactor.build({"T": "the-token"})
    error = SnapshotError("bad the-token", code=Code.INVALID_PATH, paths=[b"dir/the-token"], hint="remove the-token")
    error.add_note("note the-token")
    redactor.scrub_error(error)
    assert "the-token" not in shown(error)
    assert str(error) == "bad {secret:T} remove {secret:T}"
    assert error.paths == (b"dir/{secret:T}",)
    assert error.code == Code.INVALID_PATH


def raised(make: Any) -> SnapcoreError:
    try:
        make()
    except SnapcoreError as error:
        return error
    raise AssertionError("nothing was raised")


def from_cause() -> None:
    try:
        raise OSError(2, "No such file", "/x/the-" + "token")
    except OSError as error:
        raise ProviderError("failed") from error


def from_context() -> None:
    try:
        subprocess.run(["false", "the-" + "token"], check=True)
    except subprocess.CalledProcessError:
        raise RepositoryError("failed")  # noqa: B904


def hidden_context() -> None:
    try:
        b"\xff\xfe the-token".decode("ascii")
    except UnicodeDecodeError:
        raise RepositoryError("failed") from None


def behind_another_error() -> None:
    try:
        try:
            raise ValueError("the-" + "token")
        except ValueError as error:
            raise KeyError("harmless") from error
    except KeyError as error:
        raise ProviderError("outer the-" + "token") from error


def through_our_own() -> None:
    try:
        from_cause()
    except ProviderError as error:
        raise RepositoryError("outer") from error


def in_a_group() -> None:
    inner = OSError("one")
    inner.__cause__ = ValueError("the-" + "token")
    try:
        raise ExceptionGroup("several", [ValueError("two"), inner])
    except ExceptionGroup as error:
        raise ProviderError("failed") from error


def in_a_context_hidden_by_a_cause() -> None:
    try:
        raise ValueError("the-" + "token")
    except ValueError:
        raise ProviderError("failed") from KeyError("harmless")


def everything_behind(error: BaseException | None) -> str:
    text = ""
    while error is not None:
        text += shown(error) + (everything_behind(error.__context__) if error.__cause__ is not None else "")
        error = error.__cause__ or error.__context__
    return text


CHAINS = [
    from_cause,
    from_context,
    hidden_context,
    behind_another_error,
    through_our_own,
    in_a_group,
    in_a_context_hidden_by_a_cause,
]


@pytest.mark.parametrize("make", CHAINS)
def test_the_chain_of_an_error_holds_no_secret(make: Any) -> None:
    error = raised(make)
    assert "the-token" in everything_behind(error)
    Redactor.build({"T": "the-token"}).scrub_error(error)
    assert "the-token" not in everything_behind(error)


def test_a_cut_cause_is_noted_and_a_harmless_one_stays() -> None:
    redactor = Redactor.build({"T": "the-token"})
    error = raised(from_cause)
    redactor.scrub_error(error)
    assert "Caused by FileNotFoundError: [Errno 2] No such file: '/x/{secret:T}'" in shown(error)
    error = raised(behind_another_error)
    redactor.scrub_error(error)
    assert isinstance(error.__cause__, KeyError)


# ---- what is refused, and what never shows


@pytest.mark.parametrize(
    "secrets",
    [
        {"T": "short"},
        {"T": ""},
        {"T": "  \n "},
        {"T": "\0" * 8},
        {"T": 1234567},
        {"T": None},
        {"T": "\ud800-lone-surrogate"},
        {"": "hunter22-value"},
        {"hunter22 value": "T"},
        {"x" * 129: "hunter22-value"},
        {1: "hunter22-value"},
        {"MY_hunter22": "hunter22"},
        "hunter22",
        b"hunter22",
        ["short"],
    ],
)
def test_refused_secrets_are_not_shown(secrets: Any) -> None:
    with pytest.raises(SnapshotError) as caught:
        Redactor.build(secrets)
    assert caught.value.code == Code.INVALID_REQUEST
    text = shown(caught.value)
    assert not any(word in text.replace(__file__, "") for word in ("hunter22", "'short'", "1234567", "lone-surrogate"))


def test_short_values_are_taken_when_asked_for_and_empty_ones_never() -> None:
    redactor = Redactor.build({"PIN": "1234"}, allow_short=True)
    assert redactor.scrub_text("pin 1234") == "pin {secret:PIN}"
    with pytest.raises(SnapshotError):
        Redactor.build({"PIN": ""}, allow_short=True)


def test_two_things_of_one_name_are_refused() -> None:
    with pytest.raises(SnapshotError):
        Redactor.build({"a": "first-value"}, patterns=[RedactionPattern("a", "x+")])


@pytest.mark.parametrize(
    "make",
    [
        lambda: RedactionPattern("p", "("),
        lambda: RedactionPattern("p", re.compile("text")),  # type: ignore[arg-type]
        lambda: RedactionPattern("p", "x", max_match=65537),
        lambda: RedactionPattern("a b", "x"),
        lambda: RedactionHook("h", "", nothing),
        lambda: RedactionHook("h", "1", "no function"),  # type: ignore[arg-type]
        lambda: RedactionHook("h", "1", nothing, max_match=0),
    ],
)
def test_hooks_and_patterns_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(SnapshotError) as caught:
        make()
    assert caught.value.code == Code.INVALID_REQUEST


def test_no_repr_shows_a_value_and_nothing_can_be_pickled_or_copied() -> None:
    pattern = RedactionPattern("p", "hunter22+")
    redactor = Redactor.build({"T": "hunter22"}, hooks=[RedactionHook("h", "1", nothing)], patterns=[pattern])
    for thing in (redactor, pattern, redactor.stream(b"f")):
        assert "hunter22" not in f"{thing!r} {thing}"
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            act(redactor)
    assert redactor.names == ("T", "h", "p")


# ---- fingerprints


def test_a_fingerprint_is_of_the_set_and_the_salt() -> None:
    one = Redactor.build({"A": "value-one", "B": "value-two"})
    same = Redactor.build({"B": "value-two", "A": "value-one"})
    assert len(one.fingerprint(SALT)) == 32
    assert one.fingerprint(SALT) == same.fingerprint(SALT)
    assert one.fingerprint(SALT) != one.fingerprint(b"another salt 16b")


def test_a_fingerprint_changes_with_every_part_of_the_set() -> None:
    def hook(version: str) -> RedactionHook:
        return RedactionHook("h", version, nothing)

    sets = [
        Redactor.build({"A": "value-one"}),
        Redactor.build({"A": "value-two"}),
        Redactor.build({"B": "value-one"}),
        Redactor.build({"A": "value-one", "B": "value-two"}),
        Redactor.build({"A": "value-one"}, hooks=[hook("1")]),
        Redactor.build({"A": "value-one"}, hooks=[hook("2")]),
        Redactor.build({"A": "value-one"}, patterns=[RedactionPattern("p", "x+")]),
        Redactor.build({"A": "value-one"}, patterns=[RedactionPattern("p", "x+", 99)]),
        Redactor.build({"A": "value-one"}, patterns=[RedactionPattern("p", re.compile(b"x+", re.IGNORECASE))]),
        Redactor.build({"A": "value-one"}, patterns=[RedactionPattern("q", "x+")]),
    ]
    assert len({redactor.fingerprint(SALT) for redactor in sets}) == len(sets)


def test_a_fingerprint_is_computed_once_for_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Redactor.build({"A": "computed-once"}).fingerprint(SALT)
    monkeypatch.delattr("hashlib.scrypt")
    assert Redactor.build({"A": "computed-once"}).fingerprint(SALT) == first


# ---- speed


def test_ten_secrets_over_fifty_megabytes() -> None:
    rng = random.Random(1)
    redactor = Redactor.build([base64.b64encode(rng.randbytes(27)).decode() for _ in range(10)])
    text = " ".join(f"{rng.getrandbits(48):x} return self.value" for _ in range(3200)).encode()
    items = [(b"f", text)] * (50_000_000 // len(text))
    start = time.perf_counter()
    results = redactor.redact_many(items)
    print(f"{len(text) * len(items) / (time.perf_counter() - start) / 1e6:.0f} MB/s")
    assert all(out is text for out, _ in results)
