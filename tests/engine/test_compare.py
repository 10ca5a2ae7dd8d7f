"""A checkpoint beside a live tree: what is found, what is read for it, and that nothing is written, locked or changed."""

import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

import snapcore
from snapcore.errors import Code, ProviderError, SnapcoreError, SnapshotError
from snapcore.model import Capabilities, FileStat
from snapcore.protocols import ReadBlock
from snapcore.providers.direct import DirectWorkspace
from snapcore.repository import Repository
from snapcore.selection import FilePolicy

Make = Callable[..., Path]
Settle = Callable[[Path], None]
Found = dict[str, list[bytes]]
SECRET = "hunter2-hunter2"


def paths(diff: snapcore.Diff) -> Found:
    return {name: [d.path for d in getattr(diff, name)] for name in ("added", "changed", "removed")}


def nothing() -> Found:
    return {"added": [], "changed": [], "removed": []}


def state(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every path with what a change of it would change."""
    found = [root, *root.rglob("*")]
    stats = {str(path): path.lstat() for path in found}
    return {name: (st.st_ino, st.st_mtime_ns, st.st_ctime_ns) for name, st in stats.items()}


class Watched(DirectWorkspace):
    """Says which files were read, and may do something in the middle of reading."""

    def __init__(self, root: Path, during: Callable[[int], object] = lambda _: None) -> None:
        super().__init__(root)
        self.read_files: list[bytes] = []
        self.reads = 0
        self._during = during

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        wanted = [f.path for f in files if f.path != b".snapcore-stage/journal"]
        self.read_files += wanted
        if wanted:
            self.reads += 1
            self._during(self.reads)
        async for blocks in super().read(files):
            yield blocks


class WholeSeconds(DirectWorkspace):
    """A sandbox whose tools set times to the second."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, mtimes=False)


async def test_a_time_that_was_restored_to_the_second_is_no_difference(repo: Repository, make: Make) -> None:
    work = make({"a": "one", "b": "two"})
    os.utime(work / "a", ns=(1, 1_700_000_000_987_654_321))
    os.utime(work / "b", ns=(1, 1_700_000_000_987_654_321))
    checkpoint = await repo.capture(work, thread_id="t")
    os.utime(work / "a", ns=(1, 1_700_000_000_000_000_000))
    os.utime(work / "b", ns=(1, 1_700_000_001_000_000_000))
    assert paths(await repo.compare(checkpoint, WholeSeconds(work))) == {**nothing(), "changed": [b"b"]}
    assert paths(await repo.compare(checkpoint, work)) == {**nothing(), "changed": [b"a", b"b"]}


async def test_what_was_added_changed_and_removed_is_found_in_walk_order(repo: Repository, make: Make) -> None:
    work = make({"a": "one", "b": "two", "gone/x": "x", "gone/y": "y", "mode": "m", "z-": "last"})
    checkpoint = await repo.capture(work, thread_id="t")
    (work / "a").write_text("other, longer")
    (work / "mode").chmod(0o700)
    shutil.rmtree(work / "gone")
    make({"new/q": "q", "z/é": "e"})
    found = await repo.compare(checkpoint, work)
    assert paths(found) == {
        "added": [b"new", b"new/q", b"z", "z/é".encode()],
        "changed": [b"a", b"mode"],
        "removed": [b"gone", b"gone/x", b"gone/y"],
    }
    assert [d.what for d in found.changed] == [("content", "time"), ("mode",)]
    after = await repo.capture(work, thread_id="t")
    assert paths(await repo.diff(checkpoint, after)) == paths(found)


async def test_it_finds_what_a_diff_with_the_next_capture_finds(repo: Repository, make: Make) -> None:
    """Kinds that change, links, hard links, times."""
    work = make({"f2d": "x", "d2f/in/side": "x", "l2f": "", "touched": "same", "one": "h", "pair": "h2"})
    (work / "l2f").unlink()
    (work / "l2f").symlink_to("one")
    (work / "link").symlink_to("one")
    (work / "inside").symlink_to(work / "d2f")
    os.link(work / "pair", work / "pair-too")
    checkpoint = await repo.capture(work, thread_id="t")
    assert paths(await repo.compare(checkpoint, work)) == nothing()
    (work / "f2d").unlink()
    make({"f2d/new": "n"})
    shutil.rmtree(work / "d2f")
    make({"d2f": "file now"})
    (work / "l2f").unlink()
    make({"l2f": "file"})
    os.utime(work / "touched", ns=(1, 1))
    (work / "link").unlink()
    (work / "link").symlink_to("pair")
    (work / "pair-too").unlink()
    shutil.copy2(work / "pair", work / "pair-too")
    os.link(work / "one", work / "one-too")
    found = await repo.compare(checkpoint, work)
    after = await repo.capture(work, thread_id="t")
    stored = await repo.diff(checkpoint, after)
    assert paths(found) == paths(stored)
    assert [d.what for d in found.changed] == [d.what for d in stored.changed]
    assert [d.after and d.after.hardlink for d in found.added] == [d.after and d.after.hardlink for d in stored.added]
    assert paths(await repo.compare(after, work)) == nothing()


async def test_only_what_may_have_changed_is_read(repo: Repository, make: Make, settle: Settle) -> None:
    work = make({f"f{n}": "x" * 20 for n in range(200)})
    settle(work)
    checkpoint = await repo.capture(work, thread_id="t")
    watched = Watched(work)
    assert paths(await repo.compare(checkpoint, watched)) == nothing()
    assert watched.read_files == []
    (work / "f7").write_text("y" * 20)
    os.utime(work / "f8", ns=(5, 5))
    found = await repo.compare(checkpoint, watched)
    assert [(d.path, d.what) for d in found.changed] == [(b"f7", ("content", "time")), (b"f8", ("time",))]
    assert watched.read_files == [b"f7", b"f8"]
    await repo.compare(checkpoint, watched, reread=True)
    assert len(watched.read_files) == 202


async def test_a_write_that_keeps_size_and_time_is_found(repo: Repository, make: Make, settle: Settle) -> None:
    work = make({"a": "one"})
    settle(work)
    checkpoint = await repo.capture(work, thread_id="t")
    before = (work / "a").stat()
    (work / "a").write_text("two")
    os.utime(work / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    found = await repo.compare(checkpoint, work)
    assert [(d.path, d.what) for d in found.changed] == [(b"a", ("content",))]


async def test_another_folder_with_the_same_files_is_the_same(repo: Repository, make: Make, tmp_path: Path) -> None:
    work = make({"a": "one", "d/b": "two"})
    checkpoint = await repo.capture(work, thread_id="t")
    shutil.copytree(work, tmp_path / "copy", symlinks=True)
    assert paths(await repo.compare(checkpoint, tmp_path / "copy")) == nothing()
    (tmp_path / "copy" / "a").write_text("two")
    assert [d.what[0] for d in (await repo.compare(checkpoint, tmp_path / "copy")).changed] == ["content"]


async def test_nothing_is_stored_or_changed_and_a_writer_may_be_at_work(repo: Repository, make: Make) -> None:
    work = make({"a": "one", "d/b": "two"})
    checkpoint = await repo.capture(work, thread_id="t")
    make({"a": "changed", "new": "x"})
    blobs = [b async for b in repo.blobs.list("packs")]
    stats = await repo.checkpoints.stat_digests(DirectWorkspace(work).sandbox_id, str(work))
    tree = state(work)
    lease = (await repo.checkpoints.acquire_writer("t")).lease
    found = await repo.compare(checkpoint, work)
    assert paths(found) == {"added": [b"new"], "changed": [b"a"], "removed": []}
    await repo.checkpoints.release_writer(lease)
    assert state(work) == tree
    assert [b async for b in repo.blobs.list("packs")] == blobs
    assert await repo.checkpoints.stat_digests(DirectWorkspace(work).sandbox_id, str(work)) == stats


async def test_the_repository_may_be_unwritable(make: Make, tmp_path: Path) -> None:
    work = make({"a": "one"})
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        checkpoint = await repo.capture(work, thread_id="t")
    make({"a": "two, longer"})
    async with snapcore.open_repository(tmp_path / "repo") as repo:

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("nothing may be written")

        for name in ("pin", "acquire_writer", "save_stats", "reserve_packs", "add_pack", "append"):
            setattr(repo.checkpoints, name, refuse)
        repo.blobs.put = refuse  # type: ignore[assignment,method-assign]
        found = await repo.compare(checkpoint, work)
        assert paths(found)["changed"] == [b"a"]
        assert [p.added async for p in repo.patches(found, checkpoint, work)] == [1]


@pytest.mark.parametrize("shape", ["sealed", "staged"])
async def test_a_swap_that_was_cut_short_is_told_and_not_finished(repo: Repository, make: Make, shape: str) -> None:
    work = make({"a": "one"})
    checkpoint = await repo.capture(work, thread_id="t")
    make({".snapcore-stage/journal" + (".part" if shape == "staged" else ""): "steps", ".snapcore-stage/new/0": "new"})
    tree = state(work)
    if shape == "staged":  # nothing of it is in the tree yet
        assert paths(await repo.compare(checkpoint, work)) == nothing()
    else:
        with pytest.raises(ProviderError) as caught:
            await repo.compare(checkpoint, work)
        assert caught.value.code == Code.WORKSPACE_BUSY
        assert caught.value.retryable
    assert state(work) == tree


async def test_what_a_checkpoint_cannot_hold_is_listed(repo: Repository, make: Make) -> None:
    work = make({"was": "a file", "dir/x": "x"})
    checkpoint = await repo.capture(work, thread_id="t")
    (work / "was").unlink()
    os.mkfifo(work / "was")
    os.mkfifo(work / "fifo")
    (work / "out").symlink_to("/etc/passwd")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(work / "sock"))
        found = await repo.compare(checkpoint, work)
    assert paths(found) == {"added": [], "changed": [], "removed": [b"was"]}
    assert [(s.path, s.reason) for s in found.skipped] == [
        (b"fifo", "a FIFO"),
        (b"out", "a link that leaves the workspace"),
        (b"sock", "a socket"),
        (b"was", "a FIFO"),
    ]


async def test_what_the_capture_left_out_is_not_new(repo: Repository, make: Make) -> None:
    work = make({"a": "x"})
    os.mkfifo(work / "fifo")
    checkpoint = await repo.capture(work, thread_id="t", policy=FilePolicy(on_unsupported="skip"))
    (work / "fifo").unlink()
    make({"fifo/now/a": "folder"})
    found = await repo.compare(checkpoint, work)
    assert paths(found) == nothing()
    assert [(s.path, s.reason) for s in found.skipped] == [(b"fifo", "left out of the checkpoint: a FIFO")]


def test_what_cannot_be_read_is_listed(as_user: Callable[[Callable[[Path], None]], Path]) -> None:
    def job(root: Path) -> None:
        work = root / "work"
        (work / "locked").mkdir(parents=True)
        for name in ("a", "b", "locked/in"):
            (work / name).write_text("same")
        with snapcore.blocking.open_repository(root / "repo") as repo:
            checkpoint = repo.capture(work, thread_id="t")
            shutil.copytree(work, root / "copy")
            (root / "copy" / "a").chmod(0)
            (root / "copy" / "locked").chmod(0)
            (root / "copy" / "new").write_text("n")
            (root / "copy" / "new").chmod(0)
            found = repo.compare(checkpoint, root / "copy")
            assert paths(found) == {"added": [b"new"], "changed": [b"a"], "removed": []}
            assert [d.what for d in found.changed] == [("mode",)]
            assert [(s.path, s.reason) for s in found.skipped] == [(b"a", "unreadable"), (b"locked", "unreadable")]
            told = list(repo.patches(found, checkpoint, root / "copy"))
            assert [(p.entry.path, p.why) for p in told] == [(b"a", ""), (b"new", "unreadable")]
            (root / "copy" / "locked").chmod(0o700)

    as_user(job)


async def test_the_checkpoints_own_policy_is_used(repo: Repository, make: Make) -> None:
    work = make({"a": "x", "b.log": "log"})
    checkpoint = await repo.capture(work, thread_id="t", policy=FilePolicy.with_exclude("*.log"))
    make({"c.log": "log", ".env": "x", "node_modules/m": "x", "new": "n"})
    assert paths(await repo.compare(checkpoint, work)) == {"added": [b"new"], "changed": [], "removed": []}


async def test_another_policy_counts_on_both_sides(repo: Repository, make: Make) -> None:
    work = make({"a": "x", "gone.log": "log", "logs/b": "b"})
    checkpoint = await repo.capture(work, thread_id="t")
    (work / "gone.log").unlink()
    shutil.rmtree(work / "logs")
    make({"new.log": "log", "a": "longer"})
    found = await repo.compare(checkpoint, work, policy=FilePolicy.with_exclude("*.log", "logs/"))
    assert paths(found) == {"added": [], "changed": [b"a"], "removed": []}
    assert found.skipped == ()


async def test_what_became_excluded_is_not_taken_for_removed(repo: Repository, make: Make) -> None:
    work = make({"venv/lib/x": "x", "a": "x"})
    checkpoint = await repo.capture(work, thread_id="t")
    make({"venv/pyvenv.cfg": ""})
    found = await repo.compare(checkpoint, work)
    assert paths(found) == nothing()
    assert [(s.path, s.reason) for s in found.skipped] == [(b"venv", "excluded now")]


async def test_paths_limit_it(repo: Repository, make: Make) -> None:
    work = make({"a": "x", "d/b": "x", "d/c": "x", "dd": "x"})
    checkpoint = await repo.capture(work, thread_id="t")
    make({"a": "yy", "d/b": "yy", "dd": "yy", "d/new": "n"})
    assert paths(await repo.compare(checkpoint, work, paths=["d"])) == {"added": [b"d/new"], "changed": [b"d/b"], "removed": []}
    assert paths(await repo.compare(checkpoint, work, paths=["d/c"])) == nothing()
    with pytest.raises(SnapshotError) as caught:
        await repo.compare(checkpoint, work, paths=["d/typo"])
    assert caught.value.code == Code.INVALID_REQUEST
    after = await repo.capture(work, thread_id="t")
    assert paths(await repo.diff(checkpoint, after, paths=["d"])) == {"added": [b"d/new"], "changed": [b"d/b"], "removed": []}
    assert paths(await repo.diff(checkpoint, after, paths=["d/c"])) == nothing()
    with pytest.raises(SnapshotError):
        await repo.diff(checkpoint, after, paths=["d/typo"])


async def test_several_roots(repo: Repository, make: Make, tmp_path: Path) -> None:
    one, two = make({"a": "x"}, tmp_path / "one"), make({"a": "x"}, tmp_path / "two")
    places = {"one": str(one), "two": str(two)}
    checkpoint = await repo.capture(tmp_path, thread_id="t", roots=places)
    make({"a": "yy"}, two)
    found = await repo.compare(checkpoint, tmp_path, roots=places)
    assert [(d.root, d.path) for d in found.changed] == [("two", b"a")]
    assert [p.data.splitlines()[0] async for p in repo.patches(found, checkpoint, tmp_path, roots=places)] == [
        b"diff --git a/a b/a"
    ]
    assert paths(await repo.compare(checkpoint, tmp_path, roots={"one": str(one)})) == nothing()
    with pytest.raises(SnapshotError):
        await repo.compare(checkpoint, tmp_path)


async def test_a_first_checkpoint_is_compared_with_nothing(repo: Repository, make: Make) -> None:
    checkpoint = await repo.capture(make({"a": "x\n"}), thread_id="t")
    found = await repo.diff(None, checkpoint)
    assert paths(found) == {"added": [b"", b"a"], "changed": [], "removed": []}
    assert [p.added async for p in repo.patches(found, None, checkpoint)] == [0, 1]


async def test_a_folder_that_is_not_there(repo: Repository, make: Make, tmp_path: Path) -> None:
    checkpoint = await repo.capture(make({"a": "x"}), thread_id="t")
    with pytest.raises(SnapcoreError) as caught:
        await repo.compare(checkpoint, tmp_path / "absent")
    assert caught.value.code == Code.MISSING_WORKSPACE


# ---- files that change meanwhile


async def test_a_file_that_changes_while_it_is_read_is_read_again(repo: Repository, make: Make) -> None:
    work = make({"a": "one"})
    checkpoint = await repo.capture(work, thread_id="t")
    os.utime(work / "a", ns=(7, 7))
    steady = Watched(work, lambda n: (work / "a").write_text("two") if n == 1 else None)
    found = await repo.compare(checkpoint, steady)
    assert [d.what for d in found.changed] == [("content", "time")]
    assert (found.skipped, steady.reads) == ((), 2)
    (work / "a").write_text("one")
    restless = Watched(work, lambda n: os.utime(work / "a", ns=(n, n)))
    found = await repo.compare(checkpoint, restless)
    assert [(s.path, s.reason) for s in found.skipped] == [(b"a", "changed at every attempt to read it")]


async def test_a_file_that_grows_while_it_is_read_differs(repo: Repository, make: Make) -> None:
    work = make({"a": "one"})
    checkpoint = await repo.capture(work, thread_id="t")
    os.utime(work / "a", ns=(7, 7))
    found = await repo.compare(checkpoint, Watched(work, lambda _: (work / "a").write_text("one and more")))
    assert [(d.what, d.after and d.after.size) for d in found.changed] == [(("content", "time"), 12)]
    assert found.skipped == ()


async def test_a_file_that_vanishes_is_removed(repo: Repository, make: Make) -> None:
    work = make({"a": "one", "b": "x"})
    checkpoint = await repo.capture(work, thread_id="t")
    os.utime(work / "a", ns=(7, 7))
    found = await repo.compare(checkpoint, Watched(work, lambda _: (work / "a").unlink()))
    assert paths(found) == {"added": [], "changed": [], "removed": [b"a"]}
    assert found.skipped == ()


# ---- secrets


async def test_a_file_is_the_same_when_only_its_secret_differs(repo: Repository, make: Make, tmp_path: Path) -> None:
    work = make({"conf": f"user=me\ntoken={SECRET}\nend\n"})
    checkpoint = await repo.capture(work, thread_id="t", secrets={"TOKEN": SECRET})
    assert paths(await repo.compare(checkpoint, work)) == nothing()
    (work / "conf").write_text(f"user=me\ntoken={'x' * len(SECRET)}\nend\n")
    found = await repo.compare(checkpoint, work)
    assert [d.what for d in found.changed] == [("time",)]
    (work / "conf").write_text(f"user=ME\ntoken={SECRET}\nend\n")
    assert [d.what for d in (await repo.compare(checkpoint, work)).changed] == [("content", "time")]


CONF = "user=me\ntoken={0}\nend\n"


@pytest.mark.parametrize(
    ("saved", "text", "given", "shown"),
    [
        (CONF, "user=ME\ntoken={0}\nend\n", False, True),  # where it stood
        (CONF, "more\nmore\nuser=me\ntoken={0}\nend\n", False, True),  # moved down
        (CONF, "user=me\ntoken={0}\nend\nalso={0}{0}\n", False, True),  # where it stood, and elsewhere
        (CONF, "user=me\ntoken = {0}\nend\n", False, False),  # the line was changed: the secret may be anywhere
        (CONF, "user=me\nend\n", False, False),  # gone
        (CONF, "user=me\ntoken = {0}\nend\n", True, True),
        ("token={0}\ntoken={0}\n", "token={0}\ntoken = {0}\n", False, False),  # one of two lines was changed
        ("{0}\n", "{1}\nmore {0}\n", False, False),  # alone in the file
        ("a\n\n{0}\nb\n", "a\n{1}\n{0} \nb\n", False, False),  # alone in its line, and in another of that length
        ("a\n\n{0}\nb\n", "a\n\n{0}\nb\nmore {0}\n", False, True),
        ("a\n" + "{0}\n" * 64, "b\n" + "{0}\n" * 64, False, False),  # nothing tells the lines apart from others
        ("t={0}\n" * 64, "t={0}\n" * 63 + "t={0}\nmore {0}\n", False, True),
        ("t={0}\n" * 65, "t={0}\n" * 65 + "more\n", False, False),  # too many to look for
    ],
)
async def test_no_patch_shows_a_secret_that_was_redacted(
    repo: Repository, make: Make, saved: str, text: str, given: bool, shown: bool
) -> None:
    work = make({"conf": saved.format(SECRET)})
    secrets = {"TOKEN": SECRET}
    checkpoint = await repo.capture(work, thread_id="t", secrets=secrets)
    (work / "conf").write_text(text.format(SECRET, "x" * len(SECRET)))
    found = await repo.compare(checkpoint, work)
    (patch,) = [p async for p in repo.patches(found, checkpoint, work, secrets=secrets if given else None)]
    assert SECRET.encode() not in patch.data
    assert patch.why == ("" if shown else "redacted")
    assert (b"\n@@ " in patch.data) == shown


async def test_a_secret_in_a_name_is_listed_without_it(repo: Repository, make: Make) -> None:
    work = make({"a": "x"})
    checkpoint = await repo.capture(work, thread_id="t")
    make({f"is-{SECRET}/x": "x"})
    found = await repo.compare(checkpoint, work, secrets={"TOKEN": SECRET})
    assert paths(found) == nothing()
    assert [(s.path, s.reason) for s in found.skipped] == [
        (b"is-{secret:TOKEN}", "the secret TOKEN is part of its path or target")
    ]
