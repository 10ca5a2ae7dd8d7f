"""`snapcore.json`: what is pinned, and what a reader refuses."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapcore.chunking import DEFAULT_CHUNKER
from snapcore.config import CONFIG_KEY, RepositoryConfig, decode_config, encode_config, new_config
from snapcore.errors import Code, RepositoryError

CONFIG = RepositoryConfig(1, "1" * 32, "2" * 32, "3" * 32, DEFAULT_CHUNKER, ())

TEXT = b"""{
  "format_version": 1,
  "repository_id": "11111111111111111111111111111111",
  "database_id": "22222222222222222222222222222222",
  "salt": "33333333333333333333333333333333",
  "chunker": {
    "algorithm": "fastcdc-2020",
    "min_size": 262144,
    "average_size": 1048576,
    "max_size": 4194304,
    "normalization": 1,
    "seed": 0
  },
  "required_features": []
}
"""


def with_changes(**changes: object) -> bytes:
    return json.dumps({**json.loads(TEXT), **changes}).encode()


def without(key: str) -> bytes:
    return json.dumps({k: v for k, v in json.loads(TEXT).items() if k != key}).encode()


def code_of(data: bytes) -> Code:
    with pytest.raises(RepositoryError) as error:
        decode_config(data)
    return error.value.code


def test_the_file_is_readable_and_stays_as_it_is() -> None:
    assert CONFIG_KEY == "snapcore.json"
    assert encode_config(CONFIG) == TEXT
    assert decode_config(TEXT) == CONFIG


def test_a_new_repository_has_ids_of_its_own() -> None:
    a, b = new_config(), new_config()
    assert decode_config(encode_config(a)) == a
    ids = {a.repository_id, a.database_id, a.salt, b.repository_id, b.database_id, b.salt}
    assert len(ids) == 6
    assert all(len(i) == 32 and bytes.fromhex(i) for i in ids)
    assert (a.identity.repository_id, a.identity.database_id) == (a.repository_id, a.database_id)


def test_a_repository_keeps_the_chunker_it_was_made_with() -> None:
    chunker = {**json.loads(TEXT)["chunker"], "average_size": 2 << 20, "seed": 7}
    assert decode_config(with_changes(chunker=chunker)).chunker == msgspec.structs.replace(
        DEFAULT_CHUNKER, average_size=2 << 20, seed=7
    )


@pytest.mark.parametrize("version", [0, 2, 99, -1, 1 << 70])
def test_another_format_version_is_refused(version: int) -> None:
    assert code_of(with_changes(format_version=version)) == Code.UNSUPPORTED_FORMAT


def test_an_unknown_feature_is_refused_and_named() -> None:
    with pytest.raises(RepositoryError, match="needs encryption, sharding") as error:
        decode_config(with_changes(required_features=["sharding", "encryption"]))
    assert error.value.code == Code.UNSUPPORTED_FORMAT
    assert "newer snapcore" in str(error.value)


def test_what_a_reader_need_not_know_is_passed_over() -> None:
    assert decode_config(with_changes(note="made by a newer version")) == CONFIG


@pytest.mark.parametrize("key", list(json.loads(TEXT)))
def test_nothing_is_assumed_that_the_file_does_not_say(key: str) -> None:
    assert code_of(without(key)) == Code.DAMAGED


def test_every_parameter_of_the_chunker_must_be_known() -> None:
    assert code_of(with_changes(chunker={**json.loads(TEXT)["chunker"], "window": 64})) == Code.DAMAGED


@pytest.mark.parametrize("key", ["repository_id", "database_id", "salt"])
@pytest.mark.parametrize("value", ["", "1" * 31, "1" * 33, "g" * 32, "A" * 32, "1" * 31 + "\n", "１" * 32])
def test_an_id_that_is_not_32_hex_digits_is_damage(key: str, value: str) -> None:
    assert code_of(with_changes(**{key: value})) == Code.DAMAGED


@pytest.mark.parametrize("chunker", [{"seed": -1}, {"max_size": 1 << 40}, {"algorithm": "rabin"}, {"normalization": 9}])
def test_a_chunker_that_cannot_be_honoured_is_refused(chunker: dict[str, object]) -> None:
    assert code_of(with_changes(chunker={**json.loads(TEXT)["chunker"], **chunker})) == Code.UNSUPPORTED_FORMAT


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"note": ' + b"[" * 100_000 + b"]" * 100_000 + b", " + TEXT[1:],
        b"[" * 100_000,
        TEXT + b"{}",
        with_changes(format_version="1"),
        TEXT.replace(b"333", b"\xff33"),
        with_changes(chunker=None),
    ],
)
def test_what_cannot_be_read_is_damage(data: bytes) -> None:
    assert code_of(data) == Code.DAMAGED


def test_a_file_cut_short_anywhere_is_damage() -> None:
    for length in range(len(TEXT) - 2):
        assert code_of(TEXT[:length]) == Code.DAMAGED


def test_a_flipped_bit_never_fails_otherwise_and_never_changes_what_is_assumed() -> None:
    codes = (Code.DAMAGED, Code.UNSUPPORTED_FORMAT)
    wrong = []
    for bit in range(8 * len(TEXT)):
        damaged = bytearray(TEXT)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            config = decode_config(bytes(damaged))
        except RepositoryError as error:
            if error.code not in codes:
                wrong.append(bit)
        else:  # another digit of a number or an id: the database does not carry that id
            if encode_config(config) != bytes(damaged) and config != CONFIG:
                wrong.append(bit)
    assert wrong == []


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80))
def test_no_bytes_make_the_reader_fail_otherwise(data: bytes) -> None:
    assert code_of(data) == Code.DAMAGED
