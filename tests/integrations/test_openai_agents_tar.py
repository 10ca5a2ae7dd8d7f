"""Workspace archives of the OpenAI Agents SDK taken apart and put together again: formats, damage, hostile members, references.

What comes back is held against the SDK's own rules and its own extractor. Cases 5, 6, 8, 9, 10, 12, 14, 16, 17, 21, 23 and 39.
"""

import asyncio
import io
import logging
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("agents")

from agents.sandbox.util.tar_utils import UnsafeTarMemberError, safe_extract_tarfile, validate_tarfile

import snapcore
from snapcore.errors import Code, RepositoryError, SnapcoreError, SnapshotError
from snapcore.integrations.openai_agents import PAYLOAD, SnapshotClient
from snapcore.integrations.openai_agents_export import export_tar, refusal
from snapcore.model import Entry, Kind, Totals
from snapcore.providers.archive_index import TarIndex
from snapcore.repository import Repository

SECRET = "hunter2-is-not-a-password"


@pytest.fixture
async def repo() -> AsyncIterator[Repository]:
    async with snapcore.open_repository("memory://") as opened:
        yield opened


@pytest.fixture
def client(repo: Repository) -> SnapshotClient:
    return SnapshotClient(repo)


Described = tuple[bytes, int, float, int, int, str, bytes]


async def ran(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """What a command printed, and how it ended."""
    return await asyncio.to_thread(lambda: subprocess.run(command, capture_output=True, check=False, **options))


def member(name: str, data: bytes | None = None, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A member: a file with `data`, or what `type` says."""
    info = tarfile.TarInfo(name)
    info.type = tarfile.REGTYPE
    info.size = len(data or b"")
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data or b""


def folder(name: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.DIRTYPE, **{"mode": 0o755, **fields})


def link(name: str, target: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.SYMTYPE, linkname=target, **{"mode": 0o777, **fields})


def archive(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return out.getvalue()


def described(data: bytes) -> dict[str, Described]:
    """What an archive holds, by plain path."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as tar:
        for m in tar:
            content = tar.extractfile(m).read() if m.isreg() else b""  # type: ignore[union-attr]
            name = "/".join(part for part in m.name.split("/") if part not in ("", "."))
            found[name] = (m.type, m.mode, m.mtime, m.uid, m.gid, m.linkname if m.issym() else "", content)
    return found


def hydrated(data: bytes, to: Path) -> Path:
    """The folder that the SDK's own extractor makes of an archive."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as tar:
        safe_extract_tarfile(tar, root=to, allow_external_symlink_targets=False)
    return to


async def back(client: SnapshotClient, data: bytes) -> bytes:
    """What is downloaded after an upload."""
    await client.upload("thread", io.BytesIO(data))
    with await client.download("thread") as stream:
        assert isinstance(stream, io.IOBase)
        assert stream.tell() == 0
        return bytes(stream.read())


async def refused(client: SnapshotClient, data: bytes) -> SnapshotError:
    """The error of an upload, after which the session has no checkpoint and nobody holds it."""
    with pytest.raises(SnapshotError) as caught:
        await client.upload("thread", io.BytesIO(data))
    assert not await client.exists("thread")
    return caught.value


LONG = "long-" * 60 + "name"
ODD = [
    "plain",
    " spaces ",
    "line\nbreak",
    "-dash",
    "C:drive",
    "byte-\udcff",
    "ünï",
    LONG,
    f"a/{LONG}/b/{LONG}/c",
    "a/b",
    "q'\"*?[",
]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
async def test_names_modes_times_owners_and_contents_come_back(client: SnapshotClient, form: int) -> None:
    """Cases 12, 14, 16 and 39: nothing about a member changes on the way, but folders that were implied are there."""
    times = [1_700_000_000, 0, -1, -86_400 * 365] + (
        [1_700_000_000.5, 1_732_900_000.1234567, -1.25] if form == tarfile.PAX_FORMAT else []
    )
    modes = [0o644, 0o600, 0o444, 0o755, 0o4755, 0o2711, 0o000]
    given = [folder(".", mode=0o1777, mtime=5), folder("a", mode=0o700), folder("empty", mode=0o2775, mtime=77)]
    for number, name in enumerate(ODD):
        fields = {"mode": modes[number % len(modes)], "mtime": times[number % len(times)], "uid": 1000 + number, "gid": 70_000}
        given.append(member(f"./{name}", bytes([number]) * (number * 700), **fields))
    given.append(link("./a/to-long", LONG, mtime=9, uid=5))
    given.append(link("./dangling", "no/such"))
    data = archive(*given, form=form)
    before, after = described(data), described(await back(client, data))
    implied = {f"a/{LONG}", f"a/{LONG}/b", f"a/{LONG}/b/{LONG}"}
    assert set(after) - set(before) == implied
    assert {name: value for name, value in after.items() if name not in implied} == before


async def test_folders_come_before_what_is_in_them_and_each_path_once(client: SnapshotClient) -> None:
    data = await back(client, archive(member("b/c/d", b"1"), folder("b/c"), member("a", b"2"), folder("b/c", mode=0o700, uid=7)))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == [".", "./a", "./b", "./b/c", "./b/c/d"]
    assert (described(data)["b/c"][1], described(data)["b/c"][3]) == (0o700, 7)
    assert len(data) % 10_240 == 0


async def test_the_names_of_one_file_come_back_as_files(client: SnapshotClient, repo: Repository, tmp_path: Path) -> None:
    """Case 17: the SDK takes no hard links; the checkpoint knows that they are one."""
    same = [member(name, type=tarfile.LNKTYPE, linkname="./z/first") for name in ("./a", "./zz")]
    data = await back(client, archive(folder("z"), member("./z/first", b"content", mode=0o755, mtime=3), *same))
    found = described(data)
    assert {found[name] for name in ("a", "zz", "z/first")} == {(tarfile.REGTYPE, 0o755, 3, 0, 0, "", b"content")}
    hydrated(data, tmp_path / "to")
    head = await repo.get("thread")
    assert head is not None
    groups = {e.path: e.hardlink async for e in repo.ls(head)}
    assert groups == {b"": b"", b"a": b"", b"z": b"", b"z/first": b"a", b"zz": b"a"}
    assert head.totals.bytes == len(b"content")


async def test_what_gnu_tar_makes_of_a_real_tree_hydrates(client: SnapshotClient, repo: Repository, tmp_path: Path) -> None:
    """Cases 9 and 10: with a FIFO, an outside link and hard links, which the SDK itself would refuse altogether."""
    source = tmp_path / "source"
    (source / "d" / LONG[:250]).mkdir(parents=True)
    (source / "d" / LONG[:250] / "file").write_bytes(os.urandom(100_000))
    (source / "d" / "run").write_text("#!/bin/sh\n")
    (source / "d" / "run").chmod(0o755)
    os.link(source / "d" / "run", source / "same")
    os.mkfifo(source / "pipe")
    (source / "out").symlink_to("/etc/hostname")
    (source / "in").symlink_to("d/run")
    (source / os.fsdecode(b"\xff\xfe")).write_text("x")
    done = await ran("tar", "-C", source, "-cf", "-", ".")
    with pytest.raises(UnsafeTarMemberError):
        hydrated(done.stdout, tmp_path / "refused")
    made = hydrated(await back(client, done.stdout), tmp_path / "made")
    (source / "pipe").unlink()
    (source / "out").unlink()
    compared = await ran("diff", "-r", "--no-dereference", source, made)
    assert compared.returncode == 0, compared.stdout
    assert os.stat(made / "same").st_mode & 0o777 == 0o755
    head = await repo.get("thread")
    assert head is not None
    assert {s.path: s.reason for s in head.roots[0].skipped} == {b"out": "a link that leaves the workspace", b"pipe": "a FIFO"}


# ---- links


async def test_links_that_lead_out_by_way_of_others_are_left_out(client: SnapshotClient, repo: Repository) -> None:
    """Case 8: as it is written, `up/../..` stays inside; as the kernel takes it, it does not."""
    members = [
        folder("a"),
        folder("a/b"),
        link("up", "a/b/../.."),
        link("out", "up/../etc"),
        link("loop", "loop"),
        link("ok", "a/b/.."),
    ]
    found = described(await back(client, archive(*members)))
    assert {name for name, value in found.items() if value[0] == tarfile.SYMTYPE} == {"up", "loop", "ok"}
    head = await repo.get("thread")
    assert head is not None
    assert [s.path for s in head.roots[0].skipped] == [b"out"]


async def test_absolute_links_into_a_known_root_become_relative(repo: Repository, tmp_path: Path) -> None:
    links = {
        "a/b/file": "/workspace/t",
        "a/folder": "/workspace/a",
        "root": "/workspace",
        "other": "/workspaces/t",
        "dots": "/workspace/../t",
    }
    data = archive(folder("a"), folder("a/b"), member("t", b"1"), *(link(name, target) for name, target in links.items()))
    found = described(await back(SnapshotClient(repo, workspace_root="/workspace/"), data))
    assert {name: value[5] for name, value in found.items() if value[5]} == {
        "a/b/file": "../../t",
        "a/folder": "../a",
        "root": ".",
    }
    found = described(await back(SnapshotClient(repo), data))
    assert not any(value[5] for value in found.values())


async def test_a_home_folder_of_the_sandbox_may_be_its_workspace(repo: Repository) -> None:
    """As with E2B; nothing on this host is meant by it."""
    client = SnapshotClient(repo, workspace_root="/home/user")
    assert described(await back(client, archive(member("t", b"1"), link("l", "/home/user/t"))))["l"][5] == "t"


PARTS = st.sampled_from(["..", ".", "", "a", "b", "c"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4), st.lists(PARTS, min_size=1, max_size=6))
def test_a_link_is_left_out_exactly_when_the_sdk_would_refuse_it(path: list[str], target: list[str]) -> None:
    name, to = "/".join(path), "/".join(target)
    if not to:
        return
    data = archive(link(f"./{name}", to))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        try:
            validate_tarfile(tar, allow_external_symlink_targets=False)
            accepted = True
        except UnsafeTarMemberError:
            accepted = False
    assert (refusal(Entry(name.encode(), Kind.LINK, target=to.encode())) == "") == accepted


async def test_a_name_that_the_sdk_refuses_is_kept_and_left_out_of_the_archive(
    client: SnapshotClient, repo: Repository, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    data = archive(member("back\\slash", b"1"), folder("f\\"), member("f\\/x", b"2"), member("plain", b"3"))
    with pytest.raises(UnsafeTarMemberError):
        hydrated(data, tmp_path / "refused")
    with caplog.at_level(logging.WARNING, "snapcore.integrations.openai_agents"):
        made = hydrated(await back(client, data), tmp_path / "made")
    assert os.listdir(made) == ["plain"]
    assert "back\\slash (a name with a backslash)" in caplog.text
    head = await repo.get("thread")
    assert head is not None
    assert await repo.read_file(head, b"f\\/x") == b"2"


# ---- hostile members


HOSTILE = {
    "absolute": [member("/etc/evil", b"1")],
    "up": [member("../evil", b"1")],
    "up-inside": [folder("a"), member("a/../../evil", b"1")],
    "twice": [member("a", b"1"), member("./a", b"2")],
    "file-then-folder": [member("a", b"1"), folder("a")],
    "link-then-file": [link("a", "b"), member("a", b"1")],
    "below-a-file": [member("a", b"1"), member("a/b", b"2")],
    "below-a-link": [link("a", "/etc"), member("a/evil", b"2")],
    "below-a-later-link": [member("a/evil", b"2"), link("a", "/etc")],
    "deep-below-a-link": [link("a", "."), member("a/b/c/d", b"2")],
    "root-is-a-link": [link(".", "/etc")],
    "root-is-a-file": [member("./", b"1")],
    "name-of-a-folder": [folder("a"), member("b", type=tarfile.LNKTYPE, linkname="a")],
    "name-of-what-is-outside": [member("b", type=tarfile.LNKTYPE, linkname="/etc/passwd")],
    "too-long": [member("d/" * 20_000 + "f", b"1")],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE.keys())
async def test_an_archive_that_is_of_no_folder_is_refused(
    client: SnapshotClient, members: list[Any], request: pytest.FixtureRequest
) -> None:
    """Nothing is saved, and nothing is ever unpacked on this host: there is nothing to escape from."""
    error = await refused(client, archive(member("good", b"0"), *members))
    assert error.code == Code.INVALID_PATH
    assert ("is no folder" in str(error)) == ("below-" in request.node.name or "root-is" in request.node.name)


async def test_a_planted_restore_is_not_saved(client: SnapshotClient) -> None:
    """What a restore of snapcore leaves when it is cut short is finished by whoever comes next: it must come from no archive."""
    stage, making = ".snapcore-stage", ".snapcore-stage.0123456789abcdef"
    planted = [folder(stage), member(f"{stage}/journal", b"1"), folder(making), member(f"{making}/x", b"1")]
    kept = [folder("d"), member(f"d/{stage}", b"2"), member(f"{stage}-2", b"3")]
    assert set(described(await back(client, archive(*planted, *kept)))) == {"", "d", f"d/{stage}", f"{stage}-2"}
    await client.upload("other", io.BytesIO(archive(member(stage, b"1"))))
    assert (await client.history("other"))[0].totals.files == 0


async def test_a_nul_in_a_name_is_refused(client: SnapshotClient) -> None:
    data = archive(member("name", b"1", pax_headers={"path": "a\0b"}))
    assert (await refused(client, data)).code == Code.INVALID_PATH


async def test_devices_are_left_out_or_refused_all_at_once(client: SnapshotClient, repo: Repository) -> None:
    kinds = {"char": tarfile.CHRTYPE, "block": tarfile.BLKTYPE, "fifo": tarfile.FIFOTYPE, "vendor": b"Z"}
    data = archive(member("file", b"1"), *(member(name, type=kind) for name, kind in kinds.items()), link("out", "/etc"))
    strict = SnapshotClient(repo, policy=snapcore.FilePolicy(defaults=False))
    error = await refused(strict, data)
    assert error.code == Code.UNSUPPORTED_ENTRY
    assert set(error.paths) == {b"char", b"block", b"fifo", b"vendor", b"out"}
    assert set(described(await back(client, data))) == {"", "file"}


async def test_a_name_whose_file_is_not_in_the_archive_is_an_error_or_listed(client: SnapshotClient, repo: Repository) -> None:
    data = archive(member("kept", b"1"), member("b", type=tarfile.LNKTYPE, linkname="left/out"))
    error = await refused(client, data)
    assert (error.code, error.paths) == (Code.UNREADABLE_ENTRY, (b"b",))
    lenient = SnapshotClient(repo, policy=snapcore.FilePolicy(defaults=False, on_unreadable="skip"))
    assert set(described(await back(lenient, data))) == {"", "kept"}


async def test_folders_that_are_only_implied_have_a_limit(client: SnapshotClient) -> None:
    members = [member(f"{number}/" + "d/" * 9_000 + "f") for number in range(3)]
    assert (await refused(client, archive(*members))).code == Code.LIMIT_EXCEEDED


def raw_header(name: bytes, kind: bytes, size: bytes, mtime: bytes = b"%011o\0" % 0) -> bytes:
    header = bytearray(512)
    header[: len(name)] = name
    header[100:108] = b"0000644\0"
    header[108:116] = header[116:124] = b"0000000\0"
    header[124:136] = size
    header[136:148] = mtime
    header[156:157] = kind
    header[257:265] = b"ustar\x0000"
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def extended(text: bytes, name: bytes = b"f") -> bytes:
    """A file of no bytes behind an extended header."""
    padded = text + bytes(-len(text) % 512)
    return raw_header(b"pax", b"x", b"%011o\0" % len(text)) + padded + raw_header(name, b"0", b"%011o\0" % 0) + bytes(1024)


def record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = next(n for n in range(len(body) + 1, len(body) + 9) if len(b"%d" % n) + len(body) == n)
    return b"%d" % length + body


LIES = {
    "size-of-exbibytes": raw_header(b"f", b"0", b"\x80" + struct.pack(">3xQ", 1 << 60)) + bytes(1024),
    "negative-size": raw_header(b"f", b"0", b"\xff" * 12) + bytes(1024),
    "size-beyond-numbers": raw_header(b"f", b"0", b"\x80" + b"\xff" * 11) + bytes(1024),
    "pax-size": extended(record(b"size", b"9" * 30)),
    "pax-size-of-many-digits": extended(record(b"size", b"9" * 5000)),
    "pax-size-negative": extended(record(b"size", b"-5")),
    "pax-size-too-large": extended(record(b"size", b"1048576")),
    "pax-owner": extended(record(b"uid", b"9" * 19)),
    "time-nan": extended(record(b"mtime", b"nan")),
    "time-huge": extended(record(b"mtime", b"1e90")),
    "time-out-of-range": extended(record(b"mtime", b"99999999999")),
    "no-length": extended(b"path=a\n"),
    "length-too-large": extended(b"99999 path=a\n"),
    "length-huge": extended(b"9" * 19 + b" path=a\n"),
    "no-value": extended(b"8 path\n\n"),
    "long-extended-header": raw_header(b"pax", b"x", b"%011o\0" % (1 << 30)) + bytes(1024),
    "extended-header-of-megabytes": extended(record(b"comment", b"x" * (2 << 20))),
    "extended-then-end": raw_header(b"pax", b"x", b"%011o\0" % 8) + record(b"a", b"bcd") + bytes(504 + 1024),
    "letters-for-numbers": raw_header(b"f", b"0", b"0000000000z\0") + bytes(1024),
    "link-without-target": raw_header(b"f", b"2", b"%011o\0" % 0) + bytes(1024),
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES.keys())
async def test_headers_that_lie_are_refused(client: SnapshotClient, data: bytes) -> None:
    assert (await refused(client, data)).code == Code.INVALID_ARCHIVE


@pytest.mark.parametrize(
    "data",
    [raw_header(b"f", b"S", b"%011o\0" % 0) + bytes(1024), extended(record(b"GNU.sparse.major", b"1"))],
    ids=["old", "pax"],
)
async def test_a_sparse_file_is_refused_rather_than_taken_for_its_holes(client: SnapshotClient, data: bytes) -> None:
    error = await refused(client, data)
    assert (error.code, error.paths) == (Code.UNSUPPORTED_ENTRY, (b"f",))


async def test_times_in_scientific_notation_are_understood(client: SnapshotClient) -> None:
    data = extended(record(b"mtime", b"1.5e-05"))
    assert described(await back(client, data))["f"][2] == 1.5e-05


async def test_a_sum_of_signed_bytes_is_right_too(client: SnapshotClient) -> None:
    header = bytearray(raw_header(b"\xffname", b"0", b"%011o\0" % 0))
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % (sum(header) - 256)
    assert "\udcffname" in described(await back(client, bytes(header) + bytes(1024)))


async def test_a_global_header_holds_for_all_that_follow(client: SnapshotClient) -> None:
    text = record(b"mtime", b"12.5")
    data = raw_header(b"pax", b"g", b"%011o\0" % len(text)) + text + bytes(-len(text) % 512)
    data += raw_header(b"a", b"0", b"%011o\0" % 0) + raw_header(b"b", b"0", b"%011o\0" % 0) + bytes(1024)
    assert {value[2] for name, value in described(await back(client, data)).items() if name} == {12.5}


# ---- damage


async def test_wherever_an_archive_is_cut_nothing_is_saved(client: SnapshotClient) -> None:
    """Cases 5, 6 and 23: Python's own reader takes many of these for shorter archives."""
    data = archive(folder("."), member("./a", b"x" * 700), folder("./" + "d" * 120), link("./l", "a"), member("./z", b"y" * 5))
    end = len(data.rstrip(b"\0"))
    end += -end % 512
    for cut in sorted({*range(0, end + 1, 512), *range(17, end, 333)}):
        error = await refused(client, data[:cut])
        assert error.code == Code.INVALID_ARCHIVE, cut
        assert ("inside a." in str(error)) == (1024 <= cut < 2048), cut
    await client.upload("thread", io.BytesIO(data[: end + 512]))


async def test_whatever_byte_of_a_header_changes_nothing_is_saved(client: SnapshotClient) -> None:
    first = archive(folder("."), member("./a", b"1"))
    header = 512
    for at in [*range(header, header + 8), *range(header + 100, header + 155), header + 156, header + 257, header + 300]:
        damaged = bytearray(first)
        damaged[at] ^= 0x15
        assert (await refused(client, bytes(damaged))).code == Code.INVALID_ARCHIVE, at


async def test_a_header_that_was_overwritten_with_zeros_does_not_end_the_archive(client: SnapshotClient) -> None:
    data = bytearray(archive(member("a", b"1"), member("b", b"2"), member("c", b"3")))
    data[1024:1536] = bytes(512)
    assert (await refused(client, bytes(data))).code == Code.INVALID_ARCHIVE


async def test_a_tree_that_is_not_what_its_record_says_makes_no_archive(client: SnapshotClient, repo: Repository) -> None:
    """Case 5: what is handed out was counted."""
    await client.upload("thread", io.BytesIO(archive(member("a", b"1"))))
    head = await repo.get("thread")
    assert head is not None
    root = msgspec.structs.replace(head.roots[0], totals=Totals(files=2, bytes=1))
    with pytest.raises(SnapshotError) as caught:
        await export_tar(repo._engine, msgspec.structs.replace(head, roots=(root,)))
    assert caught.value.code == Code.INVALID_BLOB


async def test_a_download_is_whole_although_its_checkpoint_is_deleted_and_freed_meanwhile(
    client: SnapshotClient, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 34: what is being read is held against gc."""
    data = archive(member("a", os.urandom(200_000)))
    await client.upload("thread", io.BytesIO(data))
    await client.upload("thread", io.BytesIO(archive(member("b", b"1"))))
    first, last = await client.history("thread")
    reached, released = asyncio.Event(), asyncio.Event()
    get = repo.blobs.get

    async def halted(key: str, offset: int = 0, length: int | None = None) -> bytes:
        reached.set()
        await released.wait()
        return await get(key, offset, length)

    monkeypatch.setattr(repo.blobs, "get", halted)
    exporting = asyncio.create_task(export_tar(repo._engine, first))
    exporting.add_done_callback(lambda _: reached.set())
    await reached.wait()
    assert not exporting.done()
    monkeypatch.setattr(repo.blobs, "get", get)
    await repo.delete("thread", first.id)
    for _ in range(2):
        await repo.gc(grace=0, repack="none")
    released.set()
    with (await exporting).file as stream:
        assert described(stream.read())["a"] == described(data)["a"]
    for _ in range(2):
        await repo.gc(grace=0, repack="none")
    with pytest.raises(SnapshotError):
        await export_tar(repo._engine, first)
    assert (await repo.verify()).ok
    assert last.id == (await client.history("thread"))[-1].id


async def test_a_failed_save_leaves_the_last_checkpoint_the_newest(client: SnapshotClient) -> None:
    good = archive(member("a", b"1"))
    await client.upload("thread", io.BytesIO(good))
    with pytest.raises(SnapshotError):
        await client.upload("thread", io.BytesIO(archive(member("a", b"2"))[:700]))
    with await client.download("thread") as stream:
        assert described(stream.read())["a"][-1] == b"1"
    await client.upload("thread", io.BytesIO(archive(member("a", b"3"))))
    assert len(await client.history("thread")) == 2


def full_disk(**options: Any) -> Any:
    return open("/dev/full", "r+b", buffering=0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
async def test_a_host_without_room_for_temporary_files_says_so(client: SnapshotClient, monkeypatch: pytest.MonkeyPatch) -> None:
    await client.upload("thread", io.BytesIO(archive(member("a", b"1"))))
    with monkeypatch.context() as full:
        full.setattr(tempfile, "TemporaryFile", full_disk)
        for _ in range(2):
            with pytest.raises(RepositoryError, match="temporary files") as caught:
                await (client.download("thread") if _ else client.upload("thread", io.BytesIO(archive(member("a", b"2")))))
            assert caught.value.code == Code.STORE_FULL
            assert caught.value.retryable
    assert len(await client.history("thread")) == 1


async def test_a_host_without_room_for_the_index_says_so(client: SnapshotClient, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(TarIndex):
        def __init__(self) -> None:
            super().__init__()
            self._database.execute("PRAGMA max_page_count = 3")

    monkeypatch.setattr("snapcore.providers.archive.TarIndex", Small)
    members = [member(f"{number:0100}", b"") for number in range(500)]
    with pytest.raises(RepositoryError, match="temporary files") as caught:
        await client.upload("thread", io.BytesIO(archive(*members)))
    assert caught.value.code == Code.STORE_FULL
    assert not await client.exists("thread")


@pytest.mark.parametrize("data", [bytes(1024), bytes(10_240), archive(folder("."))], ids=["end-mark", "record", "root-only"])
async def test_an_archive_of_an_empty_folder_is_one(client: SnapshotClient, data: bytes) -> None:
    assert set(described(await back(client, data))) == {""}


# ---- cancelled


async def cancelled_after(steps: int, work: Coroutine[Any, Any, Any]) -> bool:
    """Cancel work after so many turns of the event loop; whether it was not done by then."""
    task = asyncio.create_task(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    if task.done():
        task.result()
        return False
    task.cancel()
    await asyncio.wait([task])
    return True


async def test_wherever_a_save_is_cancelled_it_is_whole_or_was_not(client: SnapshotClient, repo: Repository) -> None:
    """And the session is free: the next save waits for nobody."""
    data = archive(folder("d"), *(member(f"d/{number}", bytes([number]) * 5000) for number in range(20)))
    hurried = SnapshotClient(repo, wait=None)
    steps = 0
    while await cancelled_after(steps, hurried.upload("thread", io.BytesIO(data))):
        if await client.exists("thread"):
            with await client.download("thread") as stream:
                assert described(stream.read()).items() >= described(data).items()
        steps = steps * 5 // 4 + 1
        await hurried.upload("other", io.BytesIO(data))
    assert steps > 20
    await hurried.upload("thread", io.BytesIO(data))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted by Linux's /proc")
async def test_wherever_a_download_is_cancelled_no_file_stays_open(client: SnapshotClient) -> None:
    data = archive(folder("d"), *(member(f"d/{number}", bytes([number]) * 5000) for number in range(20)))
    await client.upload("thread", io.BytesIO(data))

    async def download() -> None:
        (await client.download("thread")).close()

    before = set(os.listdir("/proc/self/fd"))
    steps = 0
    while await cancelled_after(steps, download()):
        steps = steps * 5 // 4 + 1
    assert steps > 10
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # what the listing itself opens


# ---- streams


class Dribble(io.RawIOBase):
    """Gives few bytes at a time, and cannot be rewound."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(min(size, 777) if size >= 0 else 777)


async def test_a_stream_that_gives_little_at_a_time_is_read_to_its_end(client: SnapshotClient) -> None:
    data = archive(member("a", os.urandom(300_000)))
    await client.upload("thread", Dribble(data))
    with await client.download("thread") as stream:
        assert described(stream.read())["a"] == described(data)["a"]


async def test_a_file_that_is_read_in_several_pieces_comes_back(client: SnapshotClient) -> None:
    data = archive(member("large", os.urandom(9_500_001)), member("small", b"1"))
    assert described(await back(client, data)).items() >= described(data).items()


async def test_a_stream_of_text_is_refused(client: SnapshotClient) -> None:
    with pytest.raises(SnapshotError) as caught:
        await client.upload("thread", io.StringIO("text"))
    assert caught.value.code == Code.INVALID_REQUEST


LARGE = """
import asyncio, io, re, tarfile, sys
import snapcore
from snapcore.integrations.openai_agents import SnapshotClient

SIZE = 400 << 20

def peak():  # in KiB; ru_maxrss begins with what the parent held
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

class Stream(io.RawIOBase):
    def __init__(self):
        info = tarfile.TarInfo("./large")
        info.size = SIZE
        self.parts = self.pieces(info.tobuf())
    def pieces(self, header):
        yield header
        for number in range(SIZE >> 20):
            yield (b"%019d\\n" % number * 52429)[: 1 << 20]
        yield bytes(1024)
    def read(self, size=-1):
        return next(self.parts, b"")

async def main():
    async with snapcore.open_repository(sys.argv[1]) as repo:
        client = SnapshotClient(repo)
        before = peak()
        await client.upload("thread", Stream())
        with await client.download("thread") as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            (found,) = [(m.name, m.size) for m in tar if m.isreg()]
        print(found[0], found[1] == SIZE, (peak() - before) >> 10)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_memory_does_not_grow_with_the_archive(tmp_path: Path) -> None:
    """Case 21: 400 MiB through less than 250 MiB of memory."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = await ran(sys.executable, "-c", LARGE, tmp_path / "repo", env=environment)
    assert done.returncode == 0, done.stderr
    name, whole, grown = done.stdout.decode().split()
    assert (name, whole) == ("./large", "True")
    assert int(grown) < 250


# ---- references of providers


REFERENCES = {
    "e2b": b'E2B_SANDBOX_SNAPSHOT_V1\n{"snapshot_id":"s1"}',
    "modal": b'MODAL_SANDBOX_FS_SNAPSHOT_V1\n{"snapshot_id":"im-1"}',
    "vercel": b'UC_VERCEL_SNAPSHOT_V1\n{"snapshot_id":"x"}',
    "binary": bytes(range(256)) * 5000,
    "compressed": b"\x1f\x8b\x08" + bytes(range(255, 0, -1)) * 40,
    "one-byte": b"x",
}


@pytest.mark.parametrize("payload", REFERENCES.values(), ids=REFERENCES.keys())
async def test_what_is_no_tar_comes_back_bit_for_bit(client: SnapshotClient, repo: Repository, payload: bytes) -> None:
    assert await back(client, payload) == payload
    head = await repo.get("thread")
    assert head is not None
    assert set(head.artifacts) == {PAYLOAD}
    assert head.totals.files == 0


async def test_a_session_may_change_between_references_and_tars(client: SnapshotClient) -> None:
    tar = archive(member("a", b"1"))
    for data in (REFERENCES["e2b"], tar, REFERENCES["modal"]):
        found = await back(client, data)
        assert found == data if data is not tar else described(found)["a"][-1] == b"1"
    history = await client.history("thread")
    await client.rewind("thread", history[0].id)
    with await client.download("thread") as stream:
        assert stream.read() == REFERENCES["e2b"]


async def test_a_reference_with_a_secret_is_refused(repo: Repository) -> None:
    client = SnapshotClient(repo, secrets={"TOKEN": SECRET})
    error = await refused(client, b"E2B_SANDBOX_SNAPSHOT_V1\n" + SECRET.encode())
    assert error.code == Code.UNSUPPORTED_ENTRY
    assert "TOKEN" in str(error)
    assert SECRET not in str(error)


async def test_a_secret_in_a_hostile_path_is_not_shown(repo: Repository) -> None:
    error = await refused(SnapshotClient(repo, secrets={"TOKEN": SECRET}), archive(member(f"../{SECRET}", b"1")))
    assert SECRET not in f"{error} {error.paths}"


async def test_a_reference_that_is_too_large_to_be_one_is_refused(client: SnapshotClient) -> None:
    assert (await refused(client, b"x" * ((64 << 20) + 1))).code == Code.LIMIT_EXCEEDED


# ---- beside other uses of a repository


async def test_a_folder_captured_by_snapcore_hydrates_a_session(client: SnapshotClient, repo: Repository, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_text("1")
    (source / "absolute").symlink_to(source / "d" / "f")
    await repo.capture(source, thread_id="thread")
    with await client.download("thread") as stream:
        made = hydrated(stream.read(), tmp_path / "made")
    assert (made / "absolute").read_text() == "1"
    assert os.readlink(made / "absolute") == "d/f"


async def test_a_session_restores_into_any_sandbox(client: SnapshotClient, repo: Repository, tmp_path: Path) -> None:
    await client.upload("thread", io.BytesIO(archive(folder("d"), member("d/f", b"1", mode=0o755, mtime=5.25), link("l", "d"))))
    receipt = await repo.restore(tmp_path / "made", thread_id="thread")
    assert receipt is not None
    assert (receipt.files, receipt.folders, receipt.links) == (1, 1, 1)
    assert (tmp_path / "made" / "l" / "f").read_bytes() == b"1"
    assert (tmp_path / "made" / "d" / "f").stat().st_mtime_ns == 5_250_000_000


async def test_several_roots_make_no_archive(client: SnapshotClient, repo: Repository, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    await repo.capture(tmp_path / "a", thread_id="thread", roots={n: str(tmp_path / n) for n in ("a", "b")})
    with pytest.raises(SnapshotError) as caught:
        await client.download("thread")
    assert caught.value.code == Code.INVALID_REQUEST


async def test_unchanged_files_need_no_new_checkpoint_where_that_is_asked_for(repo: Repository) -> None:
    client = SnapshotClient(repo, skip_unchanged=True)
    for content in (b"1", b"1", b"2"):
        await client.upload("thread", io.BytesIO(archive(member("a", content))))
    assert len(await client.history("thread")) == 2


async def test_a_label_can_be_given_when_an_archive_is_saved_by_hand(client: SnapshotClient, repo: Repository) -> None:
    checkpoint = await client.save("thread", io.BytesIO(archive(member("a", b"1"))), label="first")
    assert await repo.get("thread", label="first") == checkpoint


@pytest.mark.parametrize(
    "options", [{"reinject": True}, {"workspace_root": "/"}, {"workspace_root": "a"}], ids=["reinject", "root", "relative"]
)
async def test_options_that_make_no_sense_are_refused(repo: Repository, options: dict[str, Any]) -> None:
    with pytest.raises(SnapcoreError) as caught:
        SnapshotClient(repo, **options)
    assert caught.value.code == Code.INVALID_REQUEST


def test_without_the_package_the_error_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['agents'] = None\n"
        "from snapcore.errors import SnapcoreError\n"
        "try:\n    import snapcore.integrations.openai_agents\n"
        "except SnapcoreError as error:\n    print(error.code, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.startswith("MISSING_EXTRA ")
    assert "pip install 'snapcore[openai-agents]'" in done.stdout
