"""Where files are cut, what records are called, and how payloads are packed and checked."""

import random
import sys
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyfastcdc import cy

from snapcore.chunking import (
    CODEC_RAW,
    CODEC_ZSTD,
    DEFAULT_CHUNKER,
    MAX_RECORD_BYTES,
    ChunkerParams,
    compress_many,
    cut,
    cut_stream_piece,
    decode_many,
    decode_payload,
    record_id,
)
from snapcore.errors import Code, RepositoryError, SnapshotError
from snapcore.model import RecordType
from snapcore.protocols import Buffer

SMALL = ChunkerParams(min_size=64, average_size=256, max_size=1024)
MIB = 1 << 20

# Cut points are part of the format: if they moved, every repository would store its files a second time.
NOISE_SIZES = [1151074, 1146204, 622410, 1282257, 1804111, 1301546, 1343547, 1080479, 1114411, 1056297, 680576]
NOISE_IDS = ["affc854061e05618", "9b8cb119d5b7131f"]
TEXT_SIZES = [1255814, 1166888, 805367, 780581, 1248989, 1033817]


def noise(size: int, seed: int = 20) -> bytes:
    return random.Random(seed).randbytes(size)


def text(size: int) -> bytes:
    rng = random.Random(3)
    words = [b"%x" % rng.getrandbits(rng.randrange(4, 40)) for _ in range(500)]
    lines = [b" ".join(rng.choices(words, k=9)) for _ in range(size // 40)]
    return b"\n".join(lines)[:size]


@contextmanager
def allocating_at_most(limit: int) -> Iterator[None]:
    """No more than `limit` bytes of Python's memory are in use at any moment of the block, beyond those before it."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        assert tracemalloc.get_traced_memory()[1] - before <= limit
    finally:
        tracemalloc.stop()


# ---- cutting


def test_the_compiled_chunker_is_in_use() -> None:
    module = sys.modules[cy.FastCDC.__module__]
    assert str(module.__file__).endswith((".so", ".pyd"))


def test_cut_points_of_noise_never_move() -> None:
    chunks = cut(noise(12 * MIB), DEFAULT_CHUNKER)
    assert [len(c) for c in chunks] == NOISE_SIZES
    assert [record_id(RecordType.CHUNK, c).hex()[:16] for c in (chunks[0], chunks[-1])] == NOISE_IDS


def test_cut_points_of_text_never_move() -> None:
    assert [len(c) for c in cut(text(6 * MIB), DEFAULT_CHUNKER)] == TEXT_SIZES


def test_a_file_little_over_the_minimum_may_be_cut() -> None:
    assert [len(c) for c in cut(noise(500 << 10, seed=18), DEFAULT_CHUNKER)] == [265_202, 246_798]


def test_the_default_parameters_never_change() -> None:
    assert msgspec.to_builtins(DEFAULT_CHUNKER) == {
        "algorithm": "fastcdc-2020",
        "min_size": 262_144,
        "average_size": 1_048_576,
        "max_size": 4_194_304,
        "normalization": 1,
        "seed": 0,
    }


def test_data_without_features_is_cut_at_the_maximum() -> None:
    assert [len(c) for c in cut(bytes(9 * MIB), DEFAULT_CHUNKER)] == [4 * MIB, 4 * MIB, MIB]


@pytest.mark.parametrize(("size", "chunks"), [(0, 0), (1, 1), (256 << 10, 1)])
def test_a_file_up_to_the_minimum_is_one_chunk_and_an_empty_one_has_none(size: int, chunks: int) -> None:
    assert [bytes(c) for c in cut(noise(size), DEFAULT_CHUNKER)] == [noise(size)] * chunks


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20_000), st.integers(0, 1000), st.booleans())
def test_chunks_are_the_file_and_keep_to_the_sizes(size: int, seed: int, repetitive: bool) -> None:
    data = (noise(200, seed) * (size // 200 + 1))[:size] if repetitive else noise(size, seed)
    chunks = cut(data, SMALL)
    assert b"".join(chunks) == data
    assert all(SMALL.min_size <= len(c) <= SMALL.max_size for c in chunks[:-1])
    assert all(0 < len(c) <= SMALL.max_size for c in chunks[-1:])


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 12_000), st.integers(0, 1000), st.lists(st.integers(0, 12_000), max_size=12))
def test_a_stream_is_cut_as_the_whole_file_however_it_is_split(size: int, seed: int, borders: list[int]) -> None:
    data = noise(size, seed)
    places = sorted({min(b, size) for b in borders} | {size})
    chunks: list[bytes] = []
    rest = b""
    start = 0
    for place in places:
        found, left = cut_stream_piece(rest + data[start:place], SMALL, last=place == size)
        chunks += [bytes(c) for c in found]
        rest, start = bytes(left), place
    assert rest == b""
    assert chunks == [bytes(c) for c in cut(data, SMALL)]


def test_an_insertion_changes_only_the_chunks_around_it() -> None:
    data = noise(200_000)
    before = {bytes(c) for c in cut(data, SMALL)}
    after = [bytes(c) for c in cut(data[:100_000] + b"inserted" + data[100_000:], SMALL)]
    assert sum(c not in before for c in after) <= 6


def test_threads_may_cut_at_the_same_time() -> None:
    data = noise(3 * MIB)
    expected = [len(c) for c in cut(data, SMALL)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: [len(c) for c in cut(data, SMALL)], range(16)))
    assert found == [expected] * 16


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "rabin"},
        {"min_size": 0},
        {"min_size": -1},
        {"min_size": 2 * MIB},
        {"average_size": 4 * MIB},
        {"max_size": MAX_RECORD_BYTES + 1},
        {"max_size": 1 << 40},
        {"min_size": 64, "average_size": 255},
        {"min_size": 64, "average_size": 256, "max_size": 1023},
        {"min_size": 2 * MIB, "average_size": 3 * MIB},
        {"average_size": 5 * MIB, "max_size": 8 * MIB},
        {"normalization": 4},
        {"normalization": -1},
        {"seed": -1},
        {"seed": 1 << 63},
    ],
)
def test_parameters_that_cannot_be_honoured_are_refused(changes: dict[str, object]) -> None:
    DEFAULT_CHUNKER.validate()
    with pytest.raises(RepositoryError) as error:
        msgspec.structs.replace(DEFAULT_CHUNKER, **changes).validate()
    assert error.value.code == Code.UNSUPPORTED_FORMAT


@pytest.mark.parametrize("normalization", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", [0, (1 << 63) - 1])
def test_parameters_that_are_accepted_can_be_used(normalization: int, seed: int) -> None:
    params = msgspec.structs.replace(SMALL, normalization=normalization, seed=seed)
    params.validate()
    assert b"".join(cut(noise(9_000), params)) == noise(9_000)


# ---- ids and payloads


def test_ids_are_pinned_and_differ_by_type() -> None:
    ids = [record_id(t, b"content").hex() for t in (1, 2, 3, 4, 5)]
    assert ids[0] == "659f0892fe4e20a2df8ae4fa86e4fc96fbe9dc8d9073034bf0f5649f8f395d08"
    assert len(set(ids)) == 5


def test_payloads_come_back_as_they_were_and_in_order() -> None:
    raws: list[Buffer] = [b"", b"a", bytes(100_000), noise(5_000), text(50_000), memoryview(text(900))[100:]]
    packed = compress_many(raws)
    assert [codec for codec, _ in packed] == [CODEC_RAW, CODEC_RAW, CODEC_ZSTD, CODEC_RAW, CODEC_ZSTD, CODEC_ZSTD]
    for raw, (codec, payload) in zip(raws, packed, strict=True):
        rid = record_id(RecordType.CHUNK, raw)
        assert decode_payload(payload, codec, len(raw), RecordType.CHUNK, rid) == raw
        assert decode_payload(memoryview(payload), codec, len(raw), RecordType.CHUNK, rid) == raw
    batch = [(payload, codec, len(raw), record_id(1, raw)) for raw, (codec, payload) in zip(raws, packed, strict=True)]
    assert decode_many(batch, RecordType.CHUNK) == raws
    assert compress_many([]) == []
    assert decode_many([], RecordType.CHUNK) == []


def decode(payload: Buffer, codec: int, raw: bytes, *, raw_size: int | None = None) -> bytes:
    return decode_payload(payload, codec, len(raw) if raw_size is None else raw_size, RecordType.CHUNK, record_id(1, raw))


@pytest.mark.parametrize("raw", [b"x" * 40, text(700)], ids=["raw", "zstd"])
def test_a_payload_cut_short_at_any_length_is_invalid(raw: bytes) -> None:
    ((codec, payload),) = compress_many([raw])
    for length in range(len(payload)):
        with pytest.raises(SnapshotError) as error:
            decode(payload[:length], codec, raw)
        assert error.value.code == Code.INVALID_BLOB


@pytest.mark.parametrize("raw", [noise(90), text(700)], ids=["raw", "zstd"])
def test_a_flipped_bit_in_a_payload_is_found_or_changes_nothing(raw: bytes) -> None:
    ((codec, payload),) = compress_many([raw])
    found = []
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found.append(decode(bytes(damaged), codec, raw) == raw)
        except SnapshotError as error:
            found.append(error.code == Code.INVALID_BLOB)
    assert all(found)


def frame_stating(size: int, content: bytes = b"") -> bytes:
    """A zstd frame whose header states `size` bytes of content, whatever it holds."""
    raw_block = (len(content) << 3 | 1).to_bytes(3, "little")  # last block, stored
    return b"\x28\xb5\x2f\xfd" + b"\xe0" + size.to_bytes(8, "little") + raw_block + content


@pytest.mark.parametrize("size", [MAX_RECORD_BYTES, MAX_RECORD_BYTES + 1, 1 << 31, 1 << 40, (1 << 63) + 5])
def test_a_frame_that_claims_a_gigantic_content_is_refused_without_room_for_it(size: int) -> None:
    payload = frame_stating(size, b"abc")
    with allocating_at_most(MAX_RECORD_BYTES + MIB), pytest.raises(SnapshotError) as error:
        decode(payload, CODEC_ZSTD, b"abc", raw_size=size)
    assert error.value.code == Code.INVALID_BLOB


def test_a_frame_that_holds_more_than_the_record_states_is_refused_without_room_for_it() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 27))
    assert len(bomb) < 1 << 15
    for payload in (bomb, frame_stating(3, b"abcdefgh" * 100)):
        with allocating_at_most(MIB), pytest.raises(SnapshotError) as error:
            decode(payload, CODEC_ZSTD, b"abc")
        assert error.value.code == Code.INVALID_BLOB


def test_a_frame_that_does_not_state_its_size_is_refused() -> None:
    raw = text(700)
    payload = zstandard.ZstdCompressor(write_content_size=False).compress(raw)
    for raw_size in (len(raw), -1, 0):
        with pytest.raises(SnapshotError) as error:
            decode(payload, CODEC_ZSTD, raw, raw_size=raw_size)
        assert error.value.code == Code.INVALID_BLOB


def test_a_payload_over_the_limit_is_refused_before_it_is_copied() -> None:
    payload = memoryview(bytes(MAX_RECORD_BYTES + 1))
    with allocating_at_most(MIB), pytest.raises(SnapshotError) as error:
        decode_payload(payload, CODEC_RAW, 3, RecordType.CHUNK, record_id(RecordType.CHUNK, b"abc"))
    assert error.value.code == Code.INVALID_BLOB


def test_another_size_codec_type_or_id_is_refused() -> None:
    raw = text(700)
    ((codec, payload),) = compress_many([raw])
    rid = record_id(RecordType.CHUNK, raw)
    for args in (
        (payload, codec, len(raw) + 1, RecordType.CHUNK, rid),
        (raw, CODEC_RAW, len(raw) - 1, RecordType.CHUNK, rid),
        (payload, CODEC_RAW, len(raw), RecordType.CHUNK, rid),
        (raw, CODEC_ZSTD, len(raw), RecordType.CHUNK, rid),
        (payload, 2, len(raw), RecordType.CHUNK, rid),
        (payload[:-1], codec, len(raw), RecordType.CHUNK, rid),
        (b"", codec, len(raw), RecordType.CHUNK, rid),
        (payload, codec, len(raw), RecordType.PAGE, rid),
        (payload, codec, len(raw), RecordType.CHUNK, rid[:-1]),
        (payload, codec, len(raw), RecordType.CHUNK, b""),
    ):
        with pytest.raises(SnapshotError) as error:
            decode_payload(*args)
        assert error.value.code == Code.INVALID_BLOB
        one, one_codec, size, record_type, one_id = args
        with pytest.raises(SnapshotError) as among_others:
            decode_many(
                [(payload, codec, len(raw), rid), (one, one_codec, size, one_id), (raw, CODEC_RAW, len(raw), rid)], record_type
            )
        assert among_others.value.code == Code.INVALID_BLOB
        with pytest.raises(SnapshotError) as alone:
            decode_many([(one, one_codec, size, one_id)], record_type)
        assert str(alone.value) == str(error.value)
        if record_type == RecordType.CHUNK:
            assert str(among_others.value) == str(error.value)  # it tells of the record that is damaged


def test_large_content_that_compression_cannot_help_is_kept_as_it_is() -> None:
    noise = random.Random(5).randbytes(1 << 20)
    assert compress_many([noise]) == [(CODEC_RAW, noise)]


def test_large_content_of_which_a_sample_compresses_is_compressed() -> None:
    mixed = random.Random(5).randbytes(500_000) + bytes(100_000) + random.Random(6).randbytes(400_000)
    ((codec, payload),) = compress_many([mixed])
    assert codec == CODEC_ZSTD
    assert len(payload) < 950_000
    assert decode_payload(payload, codec, len(mixed), RecordType.CHUNK, record_id(RecordType.CHUNK, mixed)) == mixed
