"""Reading packs without a database: their record lists from their ends, and the checkpoints in them."""

from typing import Final

import msgspec

from .engine import Engine
from .errors import Code, SnapshotError
from .model import Checkpoint, PackRecord, PackWrite, RecordType
from .packs import MAX_PACK_BYTES, pack_key, read_footer, read_pack, record_content, sound_records

__all__ = ["PackScan", "decode_checkpoint", "read_tail", "scan_pack", "scan_whole"]

TAIL_READ: Final = 64 << 10  # holds the footer of nearly every pack, and all of a small one

_decoder: Final = msgspec.msgpack.Decoder(Checkpoint)


class PackScan(msgspec.Struct, frozen=True):
    """A pack as it was found: `pack` with the records that can be read, and what is wrong with it (empty: nothing)."""

    pack: PackWrite
    checkpoints: tuple[Checkpoint, ...]
    problem: str = ""


def decode_checkpoint(raw: bytes, record_id: bytes) -> Checkpoint | None:
    """The checkpoint that a record holds, None when it holds none. Its ids are not looked at."""
    try:
        found = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return msgspec.structs.replace(found, record_id=record_id, recovered=True)


async def read_tail(engine: Engine, pack_id: str, size: int) -> tuple[list[PackRecord], bytes]:
    """A pack's record list, and its last bytes, which hold it. Raises `SnapshotError` `MISSING_BLOB`, or `INVALID_BLOB` for a
    pack without a footer that can be read, and for a small one, all of which is read, whose hash is wrong."""
    length = min(size, TAIL_READ)
    if length == size:
        data = await engine.blobs.get(pack_key(pack_id), 0, size)
        return await engine.run(read_pack, data), data
    while True:
        tail = await engine.blobs.get(pack_key(pack_id), size - length, length)
        listed = await engine.run(read_footer, tail, size)
        if not isinstance(listed, int):
            return listed, tail
        length = listed


async def scan_pack(engine: Engine, pack_id: str, size: int) -> PackScan | None:
    """A pack by its footer; one without is read whole. None when it is not there."""
    try:
        listed, tail = await read_tail(engine, pack_id, size)
        checkpoints = await _checkpoints(engine, pack_id, size, listed, tail)
    except SnapshotError as error:
        if error.code == Code.MISSING_BLOB:
            return None
        if error.code != Code.INVALID_BLOB:
            raise
        return await scan_whole(engine, pack_id, size)
    return PackScan(PackWrite(pack_id, size, tuple(listed)), checkpoints)


async def _checkpoints(engine: Engine, pack_id: str, size: int, listed: list[PackRecord], tail: bytes) -> tuple[Checkpoint, ...]:
    out: list[Checkpoint] = []
    begin = size - len(tail)
    for r in listed:
        if r.type == RecordType.CHECKPOINT:
            at = r.offset - begin
            inside = at >= 0
            payload = (
                tail[at : at + r.stored_size] if inside else await engine.blobs.get(pack_key(pack_id), r.offset, r.stored_size)
            )
            found = decode_checkpoint(record_content(payload, r), r.id)
            out += [found] if found is not None else []
    return tuple(out)


async def scan_whole(engine: Engine, pack_id: str, size: int) -> PackScan | None:
    """A pack by all of its bytes: every record is checked against its id. None when it is not there."""
    if size > 2 * MAX_PACK_BYTES:
        return PackScan(PackWrite(pack_id, size, ()), (), f"{size} bytes cannot be a pack")
    try:
        data = await engine.blobs.get(pack_key(pack_id))
    except SnapshotError as error:
        if error.code != Code.MISSING_BLOB:
            raise
        return None
    return await engine.run(_scan, pack_id, data)


def _scan(pack_id: str, data: bytes) -> PackScan:
    problem = ""
    try:
        records = read_pack(data)
        for r in records:
            record_content(memoryview(data)[r.offset : r.offset + r.stored_size], r)
    except SnapshotError as error:
        problem = error.message
        records = sound_records(data)
    found = [
        decode_checkpoint(record_content(memoryview(data)[r.offset : r.offset + r.stored_size], r), r.id)
        for r in records
        if r.type == RecordType.CHECKPOINT
    ]
    return PackScan(PackWrite(pack_id, len(data), tuple(records)), tuple(c for c in found if c is not None), problem)
