"""Export and import: archives that other programs read, trees that come back as they were, files that are whole or not there.

Cases 10, 12, 14, 16, 17 and 39.
"""

import asyncio
import gzip
import hashlib
import io
import itertools
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

import snapcore
from snapcore import Checkpoint, FilePolicy
from snapcore.errors import Code, SnapshotError
from snapcore.repository import Repository

from .. import services  # noqa: TID252  # the tests are no package that could be named

EVERYTHING = FilePolicy.everything()
Make = Callable[..., Path]


@pytest.fixture
def odd(work: Path) -> Path:
    """A tree with all that a checkpoint can hold."""
    root = os.fsencode(work)
    (work / "a").write_bytes(os.urandom(5 << 20))
    os.link(work / "a", work / "z")
    (work / "empty").touch()
    os.link(work / "empty", work / "empty too")
    (work / "folder").mkdir(mode=0o700)
    (work / "bare").mkdir()
    (work / "ünïcode").write_text("x")
    Path(os.fsdecode(root + b"/caf\xe9\n*")).write_bytes(b"odd name")
    deep = root + b"/" + b"/".join([b"\xe9" * 120, b"d" * 120, "ü".encode() * 60])
    os.makedirs(deep)
    Path(os.fsdecode(deep + b"/file")).write_bytes(b"deep")
    os.symlink("a", work / "folder" / "link")
    os.symlink(work / "folder" / "x", work / "absolute")
    os.symlink(f"{work}/folder/", work / "folder" / "slash")
    os.symlink(work, work / "folder" / "root")
    os.symlink("l" * 150, work / "dangling")
    (work / "run").write_bytes(b"#!/bin/sh\n")
    (work / "run").chmod(0o4755)
    os.utime(work / "run", ns=(0, 1_700_000_000_123_456_789))
    os.utime(work / "a", ns=(0, -1_500_000_000))
    os.utime(work / "folder" / "link", ns=(0, 12_345_678_901), follow_symlinks=False)
    work.chmod(0o750)
    return work


async def captured(repo: Repository, folder: Path, thread: str = "t") -> Checkpoint:
    return await repo.capture(str(folder), thread_id=thread, policy=EVERYTHING)


async def ran(*command: str | Path) -> subprocess.CompletedProcess[bytes]:
    return await asyncio.to_thread(lambda: subprocess.run(command, capture_output=True, check=False))


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


# ---- what comes back


@pytest.mark.parametrize("form", ["tar", "tar.gz", "tar.zst"])
async def test_a_tree_comes_back_from_an_archive_with_the_same_content_id(
    repo: Repository, odd: Path, tmp_path: Path, form: str
) -> None:
    """Cases 10, 12, 14 and 17: hard links, odd names, deep paths, links of all kinds, times before 1970, setuid."""
    first = await captured(repo, odd)
    report = await repo.export(first, tmp_path / "x", format=form, owners=True)
    again = (await repo.import_(tmp_path / "x", thread_id="again", policy=EVERYTHING)).checkpoint
    assert again.content_id == first.content_id
    assert again.totals == first.totals
    totals = first.totals
    assert (report.files, report.folders, report.links, report.bytes) == (
        totals.files,
        totals.folders,
        totals.links,
        totals.bytes,
    )


async def test_owners_come_back_only_when_they_are_asked_for(repo: Repository, work: Path) -> None:
    (work / "run").touch()
    (work / "run").chmod(0o6755)
    if os.geteuid() == 0:
        os.chown(work / "run", 3_000_000, 12)
        (work / "run").chmod(0o6755)
    first = await captured(repo, work)
    found = os.stat(work / "run")
    for owners, expected in ((True, (found.st_uid, found.st_gid, 0o6755)), (False, (0, 0, 0o755))):
        out = io.BytesIO()
        await repo.export(first, out, owners=owners)
        with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
            member = tar.getmember("./run")
        assert (member.uid, member.gid, member.mode) == expected


@pytest.mark.parametrize("program", ["tar", "bsdtar"])  # GNU's, and libarchive's
async def test_other_programs_unpack_what_was_captured(repo: Repository, odd: Path, tmp_path: Path, program: str) -> None:
    if shutil.which(program) is None:
        assert not os.environ.get(services.REQUIRED), f"{program} is not installed (Debian: apt-get install libarchive-tools)"
        pytest.skip(f"{program} is not installed")
    first = await captured(repo, odd)
    await repo.export(first, tmp_path / "x.tar", owners=True)
    out = tmp_path / "out"
    out.mkdir()
    done = await ran(program, "-xpf", tmp_path / "x.tar", "-C", out)
    assert done.returncode == 0, done.stderr
    second = await captured(repo, out, "unpacked")
    diff = await repo.diff(first, second)
    assert (diff.added, diff.removed) == ((), ())
    # links that were absolute into the root are relative, so that they lead into the folder that they were unpacked into
    changed = {e.path for e in diff.changed}
    if program == "bsdtar":  # libarchive 3.6 adds the fraction of a time before 1970 where it has to be taken off
        changed -= {b"a", b"z"}
    assert changed == {b"absolute", b"folder/root", b"folder/slash"}
    assert os.path.realpath(out / "absolute") == str(out / "folder" / "x")
    assert os.path.realpath(out / "folder" / "root") == str(out)
    assert os.stat(out / "a").st_ino == os.stat(out / "z").st_ino


async def test_gnu_tar_says_nothing_about_names_that_are_text(repo: Repository, make: Make, tmp_path: Path) -> None:
    root = make({"ünï/" + "d" * 150 + "/file": "x", "plain": "y"})
    os.symlink(root / "plain", root / "link")
    await repo.export(await captured(repo, root), tmp_path / "x.tar")
    done = await ran("tar", "-tvf", tmp_path / "x.tar")
    assert (done.returncode, done.stderr) == (0, b"")


async def test_python_reads_names_modes_times_and_contents(repo: Repository, odd: Path) -> None:
    out = io.BytesIO()
    await repo.export(await captured(repo, odd), out)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        found = {os.fsencode(member.name): member for member in tar}
        assert found[b"./a"].mtime == -1.5
        assert found[b"./z"].islnk()
        assert found[b"./z"].linkname == "./a"
        assert found[b"."].mode == 0o750
        assert found[b"./run"].pax_headers["mtime"] == "1700000000.123456789"
        file = tar.extractfile(found[b"./caf\xe9\n*"])
        assert file is not None
        assert file.read() == b"odd name"
    assert b"./" + b"/".join([b"\xe9" * 120, b"d" * 120, "ü".encode() * 60, b"file"]) in found


@pytest.mark.parametrize("form", ["ustar", "pax", "gnu"])
async def test_what_gnu_tar_makes_is_imported(repo: Repository, make: Make, tmp_path: Path, form: str) -> None:
    root = make({"a/b": "text", "empty/": "", "c": "x" * 3000})
    os.link(root / "c", root / "d")
    for path in (root / "a" / "b", root / "c"):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    first = await captured(repo, root)
    assert (await ran("tar", f"--format={form}", "-cf", tmp_path / "x.tar", "-C", root, ".")).returncode == 0
    for program, suffix in (("gzip", ".gz"), ("xz", ".xz"), ("zstd", ".zst"), ("", "")):
        if program:
            packed = await ran(program, "-kf", tmp_path / "x.tar")
            assert packed.returncode == 0, packed.stderr
        report = await repo.import_(tmp_path / f"x.tar{suffix}", thread_id=f"from{suffix}", policy=EVERYTHING)
        assert report.checkpoint.content_id == first.content_id


async def test_a_folder_is_imported_as_it_is_captured(repo: Repository, make: Make) -> None:
    root = make({"a": "x", ".env": "TOKEN=1"})
    first = await repo.capture(str(root), thread_id="t")
    report = await repo.import_(root, thread_id="again")
    assert report.checkpoint.content_id == first.content_id
    assert report.checkpoint.totals.files == 1


# ---- what an archive is


async def test_the_same_tree_gives_the_same_bytes_wherever_it_lies(
    repo: Repository, memory_repo: Repository, odd: Path, tmp_path: Path
) -> None:
    archives = []
    for each in (repo, memory_repo):
        for thread in ("one", "two"):
            out = io.BytesIO()
            report = await each.export(await captured(each, odd, thread), out, format="tar.zst")
            assert report.digest == f"sha256:{hashlib.sha256(out.getvalue()).hexdigest()}"
            archives.append(out.getvalue())
    assert len(set(archives)) == 1


@pytest.mark.parametrize(("form", "kind"), [("oci-layer", "gzip"), ("oci-layer-zstd", "zstd")])
async def test_a_layer_has_the_digests_of_an_image(repo: Repository, make: Make, form: str, kind: str) -> None:
    checkpoint = await captured(repo, make({"a/b": "text"}))
    out = io.BytesIO()
    report = await repo.export(checkpoint, out, format=form, prefix="srv/app")
    data = out.getvalue()
    tar = gzip.decompress(data) if kind == "gzip" else zstandard.ZstdDecompressor().decompressobj().decompress(data)
    assert names(tar) == ["srv/app", "srv/app/a", "srv/app/a/b"]
    assert report.media_type == f"application/vnd.oci.image.layer.v1.tar+{kind}"
    assert report.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert report.diff_id == f"sha256:{hashlib.sha256(tar).hexdigest()}"
    assert report.size == len(data)


async def test_a_layer_without_a_prefix_leaves_the_root_of_the_image_alone(repo: Repository, make: Make) -> None:
    out = io.BytesIO()
    await repo.export(await captured(repo, make({"a/b": "text"})), out, format="oci-layer")
    assert names(gzip.decompress(out.getvalue())) == ["./a", "./a/b"]


async def test_paths_take_what_is_below_and_the_folders_above(repo: Repository, make: Make) -> None:
    root = make({"a/b/c": "1", "a/d": "2", "e": "3"})
    os.link(root / "a" / "b" / "c", root / "f")
    os.link(root / "a" / "b" / "c", root / "g")
    checkpoint = await captured(repo, root)
    out = io.BytesIO()
    report = await repo.export(checkpoint, out, paths=["a/b"])
    assert names(out.getvalue()) == [".", "./a", "./a/b", "./a/b/c"]
    assert (report.files, report.bytes) == (1, 1)
    out = io.BytesIO()
    await repo.export(checkpoint, out, paths=["f", "g"])  # the file's first name is not among them
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        assert tar.getmember("./f").isreg()
        assert tar.getmember("./g").linkname == "./f"


async def test_a_root_is_named_when_there_are_several(repo: Repository, make: Make, tmp_path: Path) -> None:
    one, two = make({"a": "1"}, tmp_path / "one"), make({"b": "2"}, tmp_path / "two")
    checkpoint = await repo.capture(str(tmp_path), thread_id="t", roots={"one": str(one), "two": str(two)})
    out = io.BytesIO()
    report = await repo.export(checkpoint, out, root="two")
    assert (names(out.getvalue()), report.root) == ([".", "./b"], "two")
    with pytest.raises(SnapshotError, match="one, two"):
        await repo.export(checkpoint, io.BytesIO())


async def test_secrets_stay_zeros_and_are_named(repo: Repository, make: Make, tmp_path: Path) -> None:
    root = make({"config": "token=hunter2-is-secret\n", "other": "x"})
    secrets = {"T": "hunter2-is-secret"}
    checkpoint = await repo.capture(str(root), thread_id="t", secrets=secrets)
    out = io.BytesIO()
    report = await repo.export(checkpoint, out)
    assert report.redacted == (b"config",)
    assert b"hunter2" not in out.getvalue()
    again = await repo.import_(io.BytesIO(out.getvalue()), thread_id="again")
    assert again.checkpoint.content_id == checkpoint.content_id


async def test_an_import_is_redacted_labelled_and_made_once(repo: Repository, make: Make, tmp_path: Path) -> None:
    root = make({"config": "token=hunter2-is-secret\n", "b.log": "x"})
    assert (await ran("tar", "-cf", tmp_path / "x.tar", "-C", root, ".")).returncode == 0
    options: dict[str, Any] = {
        "secrets": {"T": "hunter2-is-secret"},
        "label": "from-tar",
        "policy": FilePolicy(exclude=["*.log"]),
        "idempotency_key": "once",
    }
    first = await repo.import_(tmp_path / "x.tar", thread_id="t", **options)
    second = await repo.import_(tmp_path / "x.tar", thread_id="t", **options)
    assert (first.created, second.created, first.checkpoint.id) == (True, False, second.checkpoint.id)
    assert first.checkpoint.label == "from-tar"
    assert [e.path async for e in repo.ls(first.checkpoint)] == [b"", b"config"]
    assert await repo.read_file(first.checkpoint, b"config") == b"token=" + bytes(17) + b"\n"


# ---- where it goes


async def test_a_file_has_its_name_only_when_it_is_whole(repo: Repository, work: Path, tmp_path: Path) -> None:
    """Case 39: a chunk that is damaged, or gone."""
    for i in range(3):
        (work / str(i)).write_bytes(os.urandom(6 << 20))
    checkpoint = await captured(repo, work)
    out = tmp_path / "out"
    out.mkdir()
    (out / "x.tar").write_bytes(b"as it was")
    largest = max((path for path in (tmp_path / "repo" / "packs").rglob("*") if path.is_file()), key=os.path.getsize)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    for target in (out / "x.tar", out / "new.tar"):
        with pytest.raises(SnapshotError) as caught:
            await repo.export(checkpoint, target)
        assert caught.value.code == Code.INVALID_BLOB
    assert os.listdir(out) == ["x.tar"]
    assert (out / "x.tar").read_bytes() == b"as it was"


async def test_wherever_an_export_is_cancelled_there_is_no_file_or_a_whole_one(
    memory_repo: Repository, odd: Path, tmp_path: Path
) -> None:
    checkpoint = await captured(memory_repo, odd)
    whole = io.BytesIO()
    await memory_repo.export(checkpoint, whole)
    out = tmp_path / "out"
    out.mkdir()
    for steps in itertools.count():
        task = asyncio.create_task(memory_repo.export(checkpoint, out / "x.tar"))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert {path.name: path.read_bytes() for path in out.iterdir()} in ({}, {"x.tar": whole.getvalue()})
        if not task.cancelled() or steps > 400:
            break
    await memory_repo.export(checkpoint, out / "x.tar")
    assert (out / "x.tar").read_bytes() == whole.getvalue()


async def test_a_device_is_written_to_and_stays_one(repo: Repository, make: Make, tmp_path: Path) -> None:
    checkpoint = await captured(repo, make({"a": "x"}))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reading = asyncio.create_task(asyncio.to_thread(fifo.read_bytes))
    await repo.export(checkpoint, fifo)
    assert names(await reading) == [".", "./a"]
    assert fifo.is_fifo()


async def test_a_link_to_a_file_is_followed(repo: Repository, make: Make, tmp_path: Path) -> None:
    checkpoint = await captured(repo, make({"a": "x"}))
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to("real")
    await repo.export(checkpoint, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert names((tmp_path / "real").read_bytes()) == [".", "./a"]


async def test_a_writer_that_takes_little_at_a_time_gets_it_all(repo: Repository, odd: Path) -> None:
    class Slow(io.RawIOBase):
        def __init__(self) -> None:
            self.taken = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.taken += bytes(data[:10_007])
            return min(len(data), 10_007)

    checkpoint = await captured(repo, odd)
    slow, whole = Slow(), io.BytesIO()
    await repo.export(checkpoint, slow)
    await repo.export(checkpoint, whole)
    assert bytes(slow.taken) == whole.getvalue()


async def test_what_is_exported_is_kept_from_gc(repo: Repository, work: Path, tmp_path: Path) -> None:
    (work / "a").write_bytes(os.urandom(40 << 20))
    checkpoint = await captured(repo, work)
    loop = asyncio.get_running_loop()
    out = io.BytesIO()

    async def collect() -> None:
        await repo.delete("t", checkpoint.id)
        await repo.gc(grace=0)

    class Collecting:
        def __init__(self) -> None:
            self.done = False

        def write(self, data: Any) -> int:
            if not self.done:
                self.done = True
                asyncio.run_coroutine_threadsafe(collect(), loop).result(60)
            return out.write(data)

    await repo.export(checkpoint, Collecting(), format="tar")
    assert names(out.getvalue()) == [".", "./a"]
    assert (await repo.stats()).checkpoints == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"format": "zip"}, "no format zip"),
        ({"paths": ["b"]}, "has no b"),
        ({"paths": ["../a"]}, "no plain|not a plain"),
        ({"paths": "a"}, "list"),
        ({"prefix": "../x"}, "not a plain"),
        ({"root": "nonesuch"}, "roots"),
    ],
)
async def test_requests_that_make_no_sense_write_nothing(
    repo: Repository, make: Make, options: dict[str, Any], match: str
) -> None:
    checkpoint = await captured(repo, make({"a": "x"}))
    out = io.BytesIO()
    with pytest.raises(SnapshotError, match=match):
        await repo.export(checkpoint, out, **options)
    assert out.getvalue() == b""


async def test_a_target_that_cannot_be_is_refused(repo: Repository, make: Make, tmp_path: Path) -> None:
    checkpoint = await captured(repo, make({"a": "x"}))
    for target in (tmp_path / "no" / "x", tmp_path, 5):
        with pytest.raises(SnapshotError, match="cannot be written to") as caught:
            await repo.export(checkpoint, target)
        assert caught.value.code == Code.INVALID_REQUEST


def test_without_async(make: Make, tmp_path: Path) -> None:
    with snapcore.blocking.open_repository(tmp_path / "repo") as repo:
        checkpoint = repo.capture(str(make({"a": "x"})), thread_id="t")
        repo.export(checkpoint, tmp_path / "x.tar.zst", format="tar.zst")
        report = repo.import_(tmp_path / "x.tar.zst", thread_id="again")
        assert report.checkpoint.content_id == checkpoint.content_id


MEMORY = r"""
import asyncio, re, sys
import snapcore
async def main():
    async with snapcore.open_repository(sys.argv[1]) as repo:
        if sys.argv[2] == "export":
            await repo.export(await repo.get("t"), sys.argv[3])
        else:
            await repo.import_(sys.argv[3], thread_id="again")
asyncio.run(main())
print(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])  # ru_maxrss begins with what the parent held
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_memory_does_not_grow_with_the_archive(repo: Repository, work: Path, tmp_path: Path) -> None:
    size = 400 << 20
    for i in range(4):  # files larger than what is held of each
        (work / str(i)).write_bytes(os.urandom(size // 4))
    await captured(repo, work)
    for what in ("export", "import"):
        done = await ran(sys.executable, "-c", MEMORY, tmp_path / "repo", what, tmp_path / "x.tar")
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) << 10 < size * 0.75
