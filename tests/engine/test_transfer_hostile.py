"""Archives that lie, are cut, damaged or hostile: an error with a code, and no checkpoint.

Cases 5, 6, 8, 16, 21 and 23.
"""

import asyncio
import bz2
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from snapcore import FilePolicy, RedactionHook
from snapcore.errors import Code, SnapshotError
from snapcore.repository import Repository

Compress = Callable[[bytes], bytes]
COMPRESSIONS: dict[str, Compress] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


async def refused(repo: Repository, source: Any, **options: Any) -> SnapshotError:
    """The error of an import that made no checkpoint."""
    with pytest.raises(SnapshotError) as caught:
        await repo.import_(io.BytesIO(source) if isinstance(source, bytes) else source, thread_id="t", **options)
    assert await repo.threads() == []
    return caught.value


LINK, HARD, FIFO, DEVICE = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE
HOSTILE = {
    "absolute": ([member("/etc/passwd")], Code.INVALID_PATH),
    "leading up": ([member("a/../../b")], Code.INVALID_PATH),
    "twice": ([member("a"), member("./a")], Code.INVALID_PATH),
    "a file and a folder": ([member("a"), member("a", type=tarfile.DIRTYPE)], Code.INVALID_PATH),
    "below a file": ([member("a"), member("a/b")], Code.INVALID_PATH),
    "below a link": ([member("a", type=LINK, linkname="."), member("a/b")], Code.INVALID_PATH),
    "a link that leads out": ([member("a", type=LINK, linkname="../b")], Code.UNSUPPORTED_ENTRY),
    "an absolute link": ([member("a", type=LINK, linkname="/etc/passwd")], Code.UNSUPPORTED_ENTRY),
    "another name of a file outside": ([member("a", type=HARD, linkname="/etc/passwd")], Code.INVALID_PATH),
    "another name of nothing": ([member("a", type=HARD, linkname="b")], Code.UNREADABLE_ENTRY),
    "a fifo": ([member("a", type=FIFO)], Code.UNSUPPORTED_ENTRY),
    "a device": ([member("a", type=DEVICE, devmajor=1, devminor=3)], Code.UNSUPPORTED_ENTRY),
    "a link that an export is said to have made": (
        [member("a", type=LINK, linkname="b", pax_headers={"comment": "snapcore:in-root=../../etc"})],
        Code.UNSUPPORTED_ENTRY,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_member_makes_no_checkpoint(memory_repo: Repository, name: str) -> None:
    """Cases 5, 8, 21 and 23: by name, by kind, by where it leads."""
    members, code = HOSTILE[name]
    error = await refused(memory_repo, tar(member("first", b"x"), *members))
    assert error.code == code
    assert error.paths


async def test_what_cannot_be_kept_is_left_out_and_listed_when_that_is_asked_for(memory_repo: Repository) -> None:
    data = tar(member("a", b"x"), member("b", type=FIFO), member("c", type=LINK, linkname="/etc"))
    report = await memory_repo.import_(io.BytesIO(data), thread_id="t", policy=FilePolicy(on_unsupported="skip"))
    assert [skipped.path for skipped in report.skipped] == [b"b", b"c"]


async def test_absolute_links_into_the_root_are_links_inside(memory_repo: Repository) -> None:
    data = tar(member("a", b"x"), member("b", type=LINK, linkname="/srv/app/a"))
    await refused(memory_repo, data)
    report = await memory_repo.import_(io.BytesIO(data), thread_id="t", workspace_root="/srv/app")
    found = {e.path: e async for e in memory_repo.ls(report.checkpoint)}
    assert (found[b"b"].target, found[b"b"].in_root) == (b"a", True)


@pytest.mark.parametrize("compression", ["", *COMPRESSIONS])
async def test_wherever_an_archive_is_cut_nothing_is_saved(memory_repo: Repository, compression: str) -> None:
    """Case 6."""
    # random, so that every cut takes something away
    whole = COMPRESSIONS.get(compression, bytes)(tar(member("a", os.urandom(3000))))
    end = len(whole) if compression else 512 + 3072 + 512  # a block of zeros ends a plain one; all after it are zeros too
    for cut in (*range(0, end, 97), end - 1):
        error = await refused(memory_repo, whole[:cut])
        assert error.code == Code.INVALID_ARCHIVE, cut
    assert (await memory_repo.import_(io.BytesIO(whole), thread_id="t")).created


@pytest.mark.parametrize("compression", ["gzip", "xz", "zstd", "bzip2"])
async def test_a_changed_byte_of_a_compressed_archive_is_found(memory_repo: Repository, compression: str) -> None:
    whole = bytearray(COMPRESSIONS[compression](tar(member("a", os.urandom(3000)))))
    place = len(whole) // 2
    whole[place] ^= 0x10
    assert (await refused(memory_repo, bytes(whole))).code == Code.INVALID_ARCHIVE


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_compressed_streams_may_follow_one_another(memory_repo: Repository, compression: str) -> None:
    data = tar(member("a", os.urandom(3000)))
    compress = COMPRESSIONS[compression]
    both = compress(data[:1500]) + compress(data[1500:])
    report = await memory_repo.import_(io.BytesIO(both), thread_id="t")
    assert await memory_repo.read_file(report.checkpoint, b"a") == data[512:3512]


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_more_after_a_compressed_stream_is_refused(memory_repo: Repository, compression: str) -> None:
    data = COMPRESSIONS[compression](tar(member("a"))) + b"more"
    assert (await refused(memory_repo, data)).code == Code.INVALID_ARCHIVE


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_a_bomb_has_a_limit(memory_repo: Repository, compression: str) -> None:
    bomb = COMPRESSIONS[compression](tar(member("a", bytes(64 << 20))))
    assert len(bomb) < 1 << 20
    error = await refused(memory_repo, bomb, max_unpacked_bytes=16 << 20)
    assert error.code == Code.LIMIT_EXCEEDED
    assert "--max-unpacked-bytes" in error.hint


async def test_the_limits_of_the_policy_hold_too(memory_repo: Repository) -> None:
    data = tar(member("a", bytes(5000)))
    error = await refused(memory_repo, data, policy=FilePolicy(max_total_bytes=4000))
    assert error.code == Code.LIMIT_EXCEEDED


async def test_a_decoder_that_wants_much_memory_is_refused(memory_repo: Repository) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(tar(member("a"))) + compressor.flush()
    assert (await refused(memory_repo, data)).code == Code.INVALID_ARCHIVE


@pytest.mark.parametrize("data", [b"", b"no tar" * 200, b"PK\3\4" + bytes(600), b"\x1f\x8b"])
async def test_what_is_no_tar_is_refused(memory_repo: Repository, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    for source in (data, path):
        assert (await refused(memory_repo, source)).code == Code.INVALID_ARCHIVE


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("/nonesuch/x.tar", {}),
        ("no\0path", {}),
        (5, {}),
        (io.StringIO("text"), {}),
        (tar(member("a")), {"max_unpacked_bytes": 0}),
        (tar(member("a")), {"roots": {"a": "/"}}),
    ],
)
async def test_sources_that_make_no_sense_are_refused(memory_repo: Repository, source: Any, options: dict[str, Any]) -> None:
    assert (await refused(memory_repo, source, **options)).code == Code.INVALID_REQUEST


async def test_a_file_that_changes_while_it_is_read_makes_no_checkpoint(memory_repo: Repository, tmp_path: Path) -> None:
    """Case 16."""
    path = tmp_path / "x.tar"
    path.write_bytes(tar(member("a", bytes(48 << 20))))

    def change(_path: str, _block: bytes) -> list[tuple[int, int]]:
        with path.open("ab") as file:
            file.write(bytes(512))
        return []

    hook = RedactionHook("change", "1", change)
    error = await refused(memory_repo, path, hooks=[hook])
    assert error.code == Code.INVALID_ARCHIVE


async def test_an_import_that_is_cancelled_leaves_a_pipe_that_stands_still(memory_repo: Repository) -> None:
    reading, writing = os.pipe()
    with io.FileIO(reading, "rb") as source, io.FileIO(writing, "wb") as sink:
        sink.write(tar(member("a", b"x"))[:700])
        task = asyncio.create_task(memory_repo.import_(source, thread_id="t"))
        done, _ = await asyncio.wait([task], timeout=0.3)
        assert not done
        task.cancel()
        await asyncio.wait([task], timeout=30)
        assert task.cancelled()
    assert await memory_repo.threads() == []
