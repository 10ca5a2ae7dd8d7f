"""Cutting files into chunks, and turning record contents into ids and compressed payloads.

FastCDC after Xia et al., "The Design of Fast Content-Defined Chunking for Data Deduplication Based Storage Systems" (IEEE
TPDS 2020), by `pyfastcdc`; BLAKE3 ids; zstd payloads. Functions here are pure and safe to call from several threads.
"""

import struct
import threading
from collections.abc import Sequence
from typing import Final, cast

import msgspec
import zstandard
from blake3 import blake3
from pyfastcdc.cy import FastCDC

from .errors import Code, RepositoryError, SnapshotError
from .model import DIGEST_BYTES
from .protocols import Buffer

__all__ = [
    "CODEC_RAW",
    "CODEC_ZSTD",
    "DEFAULT_CHUNKER",
    "MAX_RECORD_BYTES",
    "ChunkerParams",
    "compress_many",
    "cut",
    "cut_stream_piece",
    "decode_many",
    "decode_payload",
    "record_id",
]

CODEC_RAW: Final = 0
CODEC_ZSTD: Final = 1
MAX_RECORD_BYTES: Final = 8 << 20  # no record is larger, raw or stored: checked before anything is allocated
ZSTD_LEVEL: Final = 2  # a third less time than 3 for 0.6 % more bytes; see docs/benchmarks.md
SAMPLE_FROM_BYTES: Final = 128 << 10
SAMPLE_BYTES: Final = 8 << 10
MIN_SAVING: Final = 0.97  # compressed only when that leaves less than this part of the size


class ChunkerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chunk sizes in bytes, and FastCDC's normalisation level and gear seed. Pinned in `snapcore.json`."""

    algorithm: str = "fastcdc-2020"
    min_size: int = 256 << 10
    average_size: int = 1 << 20
    max_size: int = 4 << 20
    normalization: int = 1
    seed: int = 0

    def validate(self) -> None:
        """Refuse parameters that this version cannot honour."""
        sane = (
            64 <= self.min_size < self.average_size < self.max_size <= MAX_RECORD_BYTES
            and self.min_size <= 1 << 20
            and 256 <= self.average_size <= 4 << 20
            and self.max_size >= 1024
            and 0 <= self.normalization <= 3
            and 0 <= self.seed < 1 << 63
        )
        if self.algorithm != "fastcdc-2020" or not sane:
            raise RepositoryError(
                f"The repository cuts files with {self.algorithm!r} and sizes that this version does not know.",
                code=Code.UNSUPPORTED_FORMAT,
                hint="Use a newer snapcore.",
            )


DEFAULT_CHUNKER: Final = ChunkerParams()
_HASHERS: Final = {t: blake3(bytes([t])) for t in range(1, 6)}
_local = threading.local()


def record_id(record_type: int, raw: Buffer) -> bytes:
    """BLAKE3 (32 bytes) of the type byte and the raw content."""
    hasher = _HASHERS[record_type].copy()
    hasher.update(raw)
    return hasher.digest()


def _cutter(params: ChunkerParams) -> FastCDC:
    # a FastCDC object must not be used by two threads at once
    cache: dict[ChunkerParams, FastCDC] = _local.__dict__.setdefault("cutters", {})
    cutter = cache.get(params)
    if cutter is None:
        cutter = cache[params] = FastCDC(
            params.average_size,
            min_size=params.min_size,
            max_size=params.max_size,
            normalized_chunking=params.normalization,
            seed=params.seed,
        )
    return cutter


def cut(data: Buffer, params: ChunkerParams) -> list[memoryview]:
    """A whole file's chunks, as views of `data`. Up to the minimum size that is one chunk; nothing for an empty file."""
    if not len(data):
        return []
    view = memoryview(data)
    if len(data) <= params.min_size:
        return [view]
    return [view[c.offset : c.offset + c.length] for c in _cutter(params).cut_buf(view)]


def cut_stream_piece(data: Buffer, params: ChunkerParams, *, last: bool) -> tuple[list[memoryview], memoryview]:
    """Chunks at the front of a stream whose next bytes are `data`, and the rest, which begins the next piece.

    FastCDC starts afresh at each cut, so feeding rest + more bytes gives the same cuts as the whole stream at once. The
    last cut of a piece may only be the end of the data, so it is given back unless `last`.
    """
    chunks = cut(data, params)
    view = memoryview(data)
    if last or not chunks:
        return chunks, view[len(view) :]
    rest = chunks.pop()
    return chunks, rest


def compress_many(raws: Sequence[Buffer]) -> list[tuple[int, Buffer]]:
    """(codec, payload) of each content, in order. One call for the whole batch, outside the interpreter lock.

    A payload may be a view of its content, or of a buffer that it shares with the rest of the batch.
    """
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    out: list[tuple[int, Buffer]] = [(CODEC_RAW, raw) for raw in raws]
    tried = [i for i, raw in enumerate(raws) if raw and not _is_hopeless(compressor, raw)]
    if tried:
        packed = compressor.multi_compress_to_buffer([raws[i] for i in tried], threads=0)
        for place, i in enumerate(tried):
            segment = packed[place]
            if len(segment) < MIN_SAVING * len(raws[i]):
                out[i] = (CODEC_ZSTD, memoryview(cast("bytes", segment)))  # a buffer, though its stubs do not say so
    return out


def _is_hopeless(compressor: zstandard.ZstdCompressor, raw: Buffer) -> bool:
    """Whether samples of a large content show that compressing it would be in vain."""
    size = len(raw)
    if size < SAMPLE_FROM_BYTES:
        return False
    view = memoryview(raw)
    samples = (view[at : at + SAMPLE_BYTES] for at in (0, size // 2, size - SAMPLE_BYTES))
    return all(len(compressor.compress(sample)) >= MIN_SAVING * SAMPLE_BYTES for sample in samples)


def decode_payload(payload: Buffer, codec: int, raw_size: int, record_type: int, expected_id: bytes) -> bytes:
    """The raw content of a record, checked against its id. Raises `SnapshotError` `INVALID_BLOB` for anything else."""
    if not 0 <= raw_size <= MAX_RECORD_BYTES or len(payload) > MAX_RECORD_BYTES:
        raise SnapshotError("A record claims an impossible size.", code=Code.INVALID_BLOB)
    if codec == CODEC_RAW:
        raw = bytes(payload)
    elif codec == CODEC_ZSTD:
        raw = _decompress(payload, raw_size)
    else:
        raise SnapshotError(f"A record has the unknown codec {codec}.", code=Code.INVALID_BLOB)
    if len(raw) != raw_size or len(expected_id) != DIGEST_BYTES or record_id(record_type, raw) != expected_id:
        raise _other_content(expected_id)
    return raw


def decode_many(payloads: Sequence[tuple[Buffer, int, int, bytes]], record_type: int) -> list[Buffer]:
    """The raw content of each (payload, codec, raw size, expected id), in order, as `decode_payload` gives and refuses it. One
    call for the whole batch, outside the interpreter lock; contents may be views of a buffer that they share."""
    packed = [(payload, size) for payload, codec, size, _ in payloads if codec == CODEC_ZSTD]
    if not packed or not all(0 < size <= MAX_RECORD_BYTES >= len(payload) > 0 for payload, size in packed):
        return [decode_payload(payload, codec, size, record_type, i) for payload, codec, size, i in payloads]
    sizes = struct.pack(f"={len(packed)}Q", *[size for _, size in packed])
    try:
        segments = _decompressor().multi_decompress_to_buffer([p for p, _ in packed], decompressed_sizes=sizes, threads=0)
    except zstandard.ZstdError:  # one of them: the error is to tell which
        return [decode_payload(payload, codec, size, record_type, i) for payload, codec, size, i in payloads]
    out: list[Buffer] = []
    place = 0
    for payload, codec, size, expected_id in payloads:
        if codec != CODEC_ZSTD:
            out.append(decode_payload(payload, codec, size, record_type, expected_id))
            continue
        raw = memoryview(cast("bytes", segments[place]))  # a buffer, though its stubs do not say so
        place += 1
        if record_id(record_type, raw) != expected_id:
            raise _other_content(expected_id)
        out.append(raw)
    return out


def _other_content(expected_id: bytes) -> SnapshotError:
    return SnapshotError(
        f"Record {expected_id.hex()[:16]} does not hold the content it is named after.",
        code=Code.INVALID_BLOB,
        hint="Run 'snapcore verify --read-data' to see what else is damaged.",
    )


def _decompressor() -> zstandard.ZstdDecompressor:
    decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    return decompressor


def _decompress(payload: Buffer, raw_size: int) -> bytes:
    try:
        if zstandard.frame_content_size(payload) != raw_size:
            raise SnapshotError("A compressed record has another size than it states.", code=Code.INVALID_BLOB)
        return _decompressor().decompress(payload, max_output_size=raw_size)
    except zstandard.ZstdError as error:
        raise SnapshotError(f"A compressed record is damaged: {error}.", code=Code.INVALID_BLOB) from error
