"""The pack: many records in one blob. Pure functions on bytes; docs/format.md is the reference.

    header   b"SNAPPACK", version, flags, nonce length, tag length          12 bytes
    records  b"SR", type, codec, stored size, raw size, id                  44 bytes, then the payload
    footer   zstd(msgpack list of records), its length, BLAKE3, b"SNAPFOOT" the last three are 44 bytes

All integers are little-endian. The hash covers everything before itself. A reader with the footer finds every record; a
forward scan finds those of a pack whose footer is torn.
"""

import struct
from collections.abc import Iterator
from typing import Final

import msgspec
import zstandard
from blake3 import blake3

from .chunking import CODEC_RAW, CODEC_ZSTD, MAX_RECORD_BYTES, decode_payload
from .errors import Code, SnapshotError
from .model import DIGEST_BYTES, PackRecord, RecordType
from .protocols import Buffer

__all__ = [
    "HEADER_BYTES",
    "MAX_PACK_BYTES",
    "TAIL_BYTES",
    "TARGET_PACK_BYTES",
    "TARGET_PACK_RECORDS",
    "PackBuilder",
    "pack_key",
    "read_footer",
    "read_pack",
    "record_content",
    "scan_records",
    "sound_records",
]

TARGET_PACK_BYTES: Final = 16 << 20
TARGET_PACK_RECORDS: Final = 16_384  # of tiny files: bounds the footer, and the transaction that enters it
MAX_PACK_BYTES: Final = 32 << 20
VERSION: Final = 1
SALVAGE_READS: Final = 8  # how often a byte of a damaged pack may be looked at, on average

_HEADER: Final = struct.Struct("<8sBBBB")
_RECORD: Final = struct.Struct("<2sBBII32s")
_TAIL: Final = struct.Struct("<I32s8s")
_MAGIC: Final = b"SNAPPACK"
_RECORD_MAGIC: Final = b"SR"
_TAIL_MAGIC: Final = b"SNAPFOOT"
HEADER_BYTES: Final = _HEADER.size
TAIL_BYTES: Final = _TAIL.size
_MAX_FOOTER_BYTES: Final = MAX_PACK_BYTES
_TYPES: Final = frozenset({RecordType.CHUNK, RecordType.CHUNK_LIST, RecordType.PAGE, RecordType.INDEX, RecordType.CHECKPOINT})

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[PackRecord])


def pack_key(pack_id: str) -> str:
    """The blob key of a pack: `packs/<first 2 digits>/<32 hex digits>`."""
    return f"packs/{pack_id[:2]}/{pack_id}"


def _damaged(what: str) -> SnapshotError:
    return SnapshotError(
        f"A pack is damaged: {what}.",
        code=Code.INVALID_BLOB,
        hint="Run 'snapcore verify' to see which checkpoints it hurts.",
    )


class PackBuilder:
    """Collects records into the bytes of one pack. Not safe for concurrent use."""

    def __init__(self, pack_id: str) -> None:
        self.pack_id = pack_id
        self.records: list[PackRecord] = []
        self._parts: list[Buffer] = [_HEADER.pack(_MAGIC, VERSION, 0, 0, 0)]
        self._size = HEADER_BYTES

    def __len__(self) -> int:
        """Bytes so far, without the footer."""
        return self._size

    @property
    def full(self) -> bool:
        """Whether it is time for the next pack."""
        return self._size >= TARGET_PACK_BYTES or len(self.records) >= TARGET_PACK_RECORDS

    def add(self, record_type: int, record_id: bytes, raw_size: int, codec: int, payload: Buffer) -> None:
        """Append a record. The caller keeps packs below `MAX_PACK_BYTES`."""
        size = len(payload)
        self._parts.append(_RECORD.pack(_RECORD_MAGIC, record_type, codec, size, raw_size, record_id))
        self._parts.append(payload)
        self.records.append(PackRecord(record_id, record_type, self._size + _RECORD.size, size, raw_size, codec))
        self._size += _RECORD.size + size

    def finish(self) -> bytes:
        """The whole pack. The builder is spent afterwards."""
        footer = zstandard.ZstdCompressor(level=3).compress(_encoder.encode(self.records))
        parts, self._parts = self._parts, []
        parts += (footer, struct.pack("<I", len(footer)))
        hasher = blake3()
        for part in parts:
            hasher.update(part)
        return b"".join((*parts, hasher.digest(), _TAIL_MAGIC))


def read_footer(tail: Buffer, pack_size: int) -> list[PackRecord] | int:
    """The record list, from the last bytes of a pack of `pack_size` bytes.

    Returns instead how many last bytes are needed when `tail` is too short. The list is checked for consistency with the
    pack's size; records are checked against their ids when they are read. Raises `SnapshotError` `INVALID_BLOB`.
    """
    if pack_size < HEADER_BYTES + TAIL_BYTES or pack_size > 2 * MAX_PACK_BYTES:
        raise _damaged(f"{pack_size} bytes cannot be a pack")
    if len(tail) < TAIL_BYTES:
        return TAIL_BYTES
    view = memoryview(tail)
    length, _digest, magic = _TAIL.unpack(view[-TAIL_BYTES:])
    if magic != _TAIL_MAGIC:
        raise _damaged("it does not end with a footer")
    if length > pack_size - HEADER_BYTES - TAIL_BYTES:
        raise _damaged("its footer is larger than itself")
    if len(tail) < TAIL_BYTES + length:
        return int(TAIL_BYTES + length)
    start = len(view) - TAIL_BYTES - length
    return _decode_footer(view[start : start + length], pack_size - TAIL_BYTES - length)


def _decode_footer(footer: memoryview, end: int) -> list[PackRecord]:
    try:
        size = zstandard.frame_content_size(footer)
        if not 0 < size <= _MAX_FOOTER_BYTES:
            raise _damaged("its footer states an impossible size")
        records = _decoder.decode(zstandard.ZstdDecompressor().decompress(footer, max_output_size=size))
    except (zstandard.ZstdError, msgspec.MsgspecError, RecursionError) as error:
        raise _damaged("its footer cannot be read") from error
    for record in records:
        if not (
            record.type in _TYPES
            and len(record.id) == DIGEST_BYTES
            and record.codec in (CODEC_RAW, CODEC_ZSTD)
            and HEADER_BYTES + _RECORD.size <= record.offset
            and 0 <= record.stored_size <= MAX_RECORD_BYTES
            and 0 <= record.raw_size <= MAX_RECORD_BYTES
            and record.offset + record.stored_size <= end
        ):
            raise _damaged("its footer lists an impossible record")
    return records


def read_pack(data: Buffer) -> list[PackRecord]:
    """The record list of a whole pack, with its header and its hash checked. Raises `SnapshotError` `INVALID_BLOB`."""
    view = memoryview(data)
    _check_header(view)
    records = read_footer(view, len(view))
    if isinstance(records, int):
        raise _damaged("it is cut short")
    _length, digest, _magic = _TAIL.unpack(view[-TAIL_BYTES:])
    if blake3(view[: len(view) - TAIL_BYTES + 4]).digest() != digest:
        raise _damaged("its hash does not match")
    return records


def _check_header(view: memoryview) -> None:
    if len(view) < HEADER_BYTES:
        raise _damaged("it is shorter than its header")
    magic, version, flags, nonce, tag = _HEADER.unpack(view[:HEADER_BYTES])
    if magic != _MAGIC:
        raise _damaged("it does not begin as a pack")
    if version != VERSION or flags or nonce or tag:
        raise SnapshotError(
            f"A pack has version {version} and flags {flags:#x}, which this version cannot read.",
            code=Code.INVALID_BLOB,
            hint="Use a newer snapcore.",
        )


def scan_records(data: Buffer) -> Iterator[PackRecord]:
    """The whole records at the front of a pack without its footer, in order, up to the first that is torn or damaged."""
    view = memoryview(data)
    _check_header(view)
    at = HEADER_BYTES
    while at + _RECORD.size <= len(view):
        magic, record_type, codec, stored, raw, record_id = _RECORD.unpack(view[at : at + _RECORD.size])
        at += _RECORD.size
        if magic != _RECORD_MAGIC or record_type not in _TYPES or stored > MAX_RECORD_BYTES or at + stored > len(view):
            return
        record = PackRecord(record_id, record_type, at, stored, raw, codec)
        try:
            record_content(view[at : at + stored], record)
        except SnapshotError:
            return
        yield record
        at += stored


def sound_records(data: Buffer) -> list[PackRecord]:
    """The records of a damaged pack that can still be read, each checked against its id: those that its footer lists, and, where
    that is torn or lists what is not there, those that the records' own headers tell of."""
    view = memoryview(data)
    try:
        listed = read_footer(view, len(view))
    except SnapshotError:
        listed = 0
    if isinstance(listed, int):
        return list(_by_headers(data))
    sound = [r for r in listed if _is_sound(view, r)]
    if len(sound) < len(listed):
        places = {(r.id, r.offset) for r in sound}
        sound += [r for r in _by_headers(data) if (r.id, r.offset) not in places]
    return sound


def _is_sound(view: memoryview, record: PackRecord) -> bool:
    try:
        record_content(view[record.offset : record.offset + record.stored_size], record)
    except SnapshotError:
        return False
    return True


def _by_headers(data: Buffer) -> Iterator[PackRecord]:
    """Records found by their headers, wherever these are: what a damaged length hides is found by the next record's mark."""
    view = memoryview(data)
    raw = bytes(view)
    budget = SALVAGE_READS * len(raw)  # forged headers that overlap would have the same bytes hashed for ever
    at = raw.find(_RECORD_MAGIC, HEADER_BYTES)
    while 0 <= at <= len(raw) - _RECORD.size and budget > 0:
        _, record_type, codec, stored, size, record_id = _RECORD.unpack_from(raw, at)
        start = at + _RECORD.size
        next_at = at + 1
        if record_type in _TYPES and stored <= MAX_RECORD_BYTES and size <= MAX_RECORD_BYTES and start + stored <= len(raw):
            budget -= stored + size
            record = PackRecord(record_id, record_type, start, stored, size, codec)
            if _is_sound(view, record):
                yield record
                next_at = start + stored
        at = raw.find(_RECORD_MAGIC, next_at)


def record_content(payload: Buffer, record: PackRecord) -> bytes:
    """The raw content of a record of this pack, checked against its id."""
    return decode_payload(payload, record.codec, record.raw_size, record.type, record.id)
