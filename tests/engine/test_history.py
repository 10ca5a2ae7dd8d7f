"""Fork, labels, rewind, delete, and looking into checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapcore.errors import CheckpointConflictError, Code, SnapshotError
from snapcore.model import Checkpoint
from snapcore.repository import Repository
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree

Make = Callable[..., Path]


@pytest.fixture
async def thread(memory_repo: Repository, make: Make) -> list[Checkpoint]:
    """Thread `t` of four checkpoints; file `a` holds the number of each; steps 1, 2, none, 7."""
    out = []
    for number, step in enumerate((1, 2, None, 7)):
        work = make({"a": str(number), "same": "s", f"only-{number}": "x"})
        out.append(
            await memory_repo.capture(
                work, thread_id="t", step=step, label=f"l{number % 2}", conversation=[number], artifacts={"n": b"%d" % number}
            )
        )
        (work / f"only-{number}").unlink()
    return out


def number_of(place: Path) -> str:
    return (place / "a").read_text()


# ---- fork


async def test_a_fork_copies_the_record_and_no_bytes(memory_repo: Repository, thread: list[Checkpoint], tmp_path: Path) -> None:
    """New root without a parent, reason `fork-root`, content, conversation and artifacts of the source; which is as it was."""
    before = await memory_repo.list("t")
    stored = (await memory_repo.stats()).stored_bytes
    fork = await memory_repo.fork("t", thread[1].id, to_thread_id="u")
    source = thread[1]
    assert (fork.reason, fork.parent_id, fork.thread_id) == ("fork-root", None, "u")
    assert (fork.source_thread_id, fork.source_id) == ("t", source.id)
    assert fork.id != source.id
    assert (fork.roots, fork.content_id, fork.step, fork.label) == (source.roots, source.content_id, source.step, source.label)
    assert await memory_repo.read_conversation(fork) == [1]
    assert await memory_repo.read_artifact(fork, "n") == b"1"
    assert await memory_repo.list("t") == before
    assert await memory_repo.list("u") == [fork]
    assert (await memory_repo.stats()).stored_bytes - stored < 3_000
    await memory_repo.restore(tmp_path / "target", thread_id="u")
    assert number_of(tmp_path / "target") == "1"


async def test_a_fork_takes_the_head_or_the_newest_at_a_step(memory_repo: Repository, thread: list[Checkpoint]) -> None:
    assert (await memory_repo.fork("t", to_thread_id="head")).source_id == thread[3].id
    for step, expected in ((1, 0), (2, 1), (5, 1), (7, 3), (100, 3)):
        fork = await memory_repo.fork("t", to_thread_id=f"step-{step}", at_step=step)
        assert fork.source_id == thread[expected].id
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.fork("t", to_thread_id="early", at_step=0)
    assert caught.value.code == Code.MISSING_CHECKPOINT


async def test_the_destination_of_a_fork_must_be_another_and_empty(
    memory_repo: Repository, thread: list[Checkpoint], make: Make
) -> None:
    await memory_repo.capture(make({"a": "other"}), thread_id="taken")
    cases: list[tuple[str, str, type[Exception], Code]] = [
        ("t", "taken", CheckpointConflictError, Code.DESTINATION_NOT_EMPTY),
        ("t", "t", CheckpointConflictError, Code.SAME_THREAD),
        ("none", "new", SnapshotError, Code.MISSING_CHECKPOINT),
        ("t", "", SnapshotError, Code.INVALID_ID),
    ]
    for source, to, kind, code in cases:
        with pytest.raises(kind) as caught:
            await memory_repo.fork(source, to_thread_id=to)
        assert getattr(caught.value, "code", None) == code
    with pytest.raises(SnapshotError):
        await memory_repo.fork("t", "no-such-id", to_thread_id="new")
    assert [info.thread_id for info in await memory_repo.threads()] == ["t", "taken"]
    assert len(await memory_repo.list("taken")) == 1


async def test_a_fork_lives_on_its_own(memory_repo: Repository, thread: list[Checkpoint], make: Make, tmp_path: Path) -> None:
    """Captures, deletions on either side do not reach the other."""
    fork = await memory_repo.fork("t", thread[0].id, to_thread_id="u")
    await memory_repo.capture(make({"a": "fork"}), thread_id="u")
    for checkpoint in thread:
        await memory_repo.delete("t", checkpoint.id)
    assert await memory_repo.list("t") == []
    await memory_repo.restore(tmp_path / "target", thread_id="u", checkpoint_id=fork.id)
    assert number_of(tmp_path / "target") == "0"
    second = await memory_repo.fork("u", fork.id, to_thread_id="v")
    assert (second.source_thread_id, second.source_id) == ("u", fork.id)


# ---- labels


async def test_a_label_finds_the_newest_that_has_it(memory_repo: Repository, thread: list[Checkpoint]) -> None:
    for label, expected in (("l0", 2), ("l1", 3)):
        found = await memory_repo.get("t", label=label)
        assert found == thread[expected]
        assert await memory_repo.resolve(f"label:{label}", "t") == found
    assert await memory_repo.get("t", label="none") is None
    assert await memory_repo.get("none", label="l0") is None


async def test_labels_are_given_and_taken_away(memory_repo: Repository, thread: list[Checkpoint], tmp_path: Path) -> None:
    """Only label and reason change; the checkpoint restores as before."""
    changed = await memory_repo.label("t", thread[0].id, "release")
    assert (changed.label, changed.reason, changed.id, changed.roots) == ("release", "named", thread[0].id, thread[0].roots)
    assert await memory_repo.get("t", label="release") == changed
    bare = await memory_repo.label("t", thread[0].id, None)
    assert (bare.label, bare.reason) == (None, "automatic")
    assert await memory_repo.get("t", label="release") is None
    assert [c.id for c in await memory_repo.list("t")] == [c.id for c in thread]
    await memory_repo.restore(tmp_path / "target", thread_id="t", checkpoint_id=thread[0].id)
    assert number_of(tmp_path / "target") == "0"
    fork = await memory_repo.fork("t", to_thread_id="u")
    assert (await memory_repo.label("u", fork.id, "mine")).reason == "fork-root"
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.label("t", "none", "x")
    assert caught.value.code == Code.MISSING_CHECKPOINT


# ---- rewind and delete


async def test_a_rewind_appends_and_rewrites_nothing(memory_repo: Repository, thread: list[Checkpoint], tmp_path: Path) -> None:
    back = await memory_repo.rewind("t", thread[1].id)
    assert (back.reason, back.parent_id, back.source_id) == ("rewind", thread[3].id, thread[1].id)
    assert back.label is None
    assert back.created_at > thread[3].created_at
    assert await memory_repo.list("t") == [*thread, back]
    assert back.content_id == thread[1].content_id
    await memory_repo.restore(tmp_path / "target", thread_id="t")
    assert number_of(tmp_path / "target") == "1"
    forth = await memory_repo.rewind("t", thread[3].id)
    await memory_repo.restore(tmp_path / "target", thread_id="t")
    assert number_of(tmp_path / "target") == "3"
    assert forth.parent_id == back.id
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.rewind("t", "none")
    assert caught.value.code == Code.MISSING_CHECKPOINT


async def test_deleting_the_head_brings_back_the_one_before(
    memory_repo: Repository, thread: list[Checkpoint], make: Make
) -> None:
    assert (await memory_repo.delete_head("t")).id == thread[3].id
    assert await memory_repo.get("t") == thread[2]
    await memory_repo.delete("t", thread[1].id)
    assert [c.id for c in await memory_repo.list("t")] == [thread[0].id, thread[2].id]
    after = await memory_repo.capture(make({"a": "after"}), thread_id="t")
    assert after.parent_id == thread[2].id
    for _ in range(3):
        await memory_repo.delete_head("t")
    assert await memory_repo.get("t") is None
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.delete_head("t")
    assert caught.value.code == Code.MISSING_CHECKPOINT
    with pytest.raises(SnapshotError):
        await memory_repo.delete("t", thread[0].id)
    again = await memory_repo.capture(make({"a": "again"}), thread_id="t")
    assert again.parent_id is None


async def test_a_capture_after_a_deletion_does_not_lean_on_what_was_deleted(
    memory_repo: Repository, make: Make, settle: Callable[[Path], None], tmp_path: Path
) -> None:
    work = make({f"f{n}": os.urandom(1000) for n in range(20)})
    settle(work)
    await memory_repo.capture(work, thread_id="t")
    await memory_repo.delete_head("t")
    report = await memory_repo.capture_with_report(work, thread_id="t")
    assert (await memory_repo.verify(read_data=True)).ok
    await memory_repo.restore(tmp_path / "target", thread_id="t", verify="content")
    assert compare_trees(work, tmp_path / "target") == []
    assert report.created


# ---- finding


async def test_checkpoints_are_found_by_id_prefix_label_or_as_the_latest(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "1"})
    made = {name: await memory_repo.capture(work, thread_id="t", checkpoint_id=name) for name in ("abc", "abcd", "x1")}
    other = await memory_repo.capture(work, thread_id="u", checkpoint_id="x2")
    assert await memory_repo.resolve("latest", "t") == made["x1"]
    assert await memory_repo.resolve("abc", "t") == made["abc"]  # exact, though it is a prefix too
    assert await memory_repo.resolve("abcd") == made["abcd"]
    assert await memory_repo.resolve("x", "u") == other
    for spec, thread, code in (
        ("x", None, Code.AMBIGUOUS_ID),
        ("ab", "t", Code.AMBIGUOUS_ID),
        ("nope", "t", Code.MISSING_CHECKPOINT),
        ("", "t", Code.INVALID_REQUEST),
        ("%", "t", Code.MISSING_CHECKPOINT),
        ("ab_", "t", Code.MISSING_CHECKPOINT),
        ("x2", "t", Code.MISSING_CHECKPOINT),
        ("label:none", "t", Code.MISSING_CHECKPOINT),
        ("latest", "empty", Code.MISSING_CHECKPOINT),
        ("latest", None, Code.INVALID_REQUEST),
    ):
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.resolve(spec, thread)
        assert caught.value.code == code, spec


async def test_threads_are_listed_with_their_heads(memory_repo: Repository, thread: list[Checkpoint], make: Make) -> None:
    one = await memory_repo.capture(make({"a": "1"}), thread_id="another")
    infos = {info.thread_id: (info.head_id, info.checkpoints) for info in await memory_repo.threads()}
    assert infos == {"t": (thread[3].id, 4), "another": (one.id, 1)}
    assert await memory_repo.list("none") == []
    assert await memory_repo.get("none") is None
    assert await memory_repo.get("t", thread[0].id) == thread[0]
    assert await memory_repo.get("another", thread[0].id) is None


# ---- looking inside


async def test_ls_lists_at_and_below_a_path(memory_repo: Repository, make: Make) -> None:
    work = make({"a/b/c": "1", "a/b.txt": "2", "a.txt": "3", "ab/x": "4", "empty/": ""})
    checkpoint = await memory_repo.capture(work, thread_id="t")

    async def ls(*args: Any, **options: Any) -> list[bytes]:
        return [e.path async for e in memory_repo.ls(checkpoint, *args, **options)]

    assert await ls() == [b"", b"a", b"a/b", b"a/b/c", b"a/b.txt", b"a.txt", b"ab", b"ab/x", b"empty"]
    assert await ls(recursive=False) == [b"", b"a", b"a.txt", b"ab", b"empty"]
    assert await ls(b"a") == [b"a", b"a/b", b"a/b/c", b"a/b.txt"]
    assert await ls(b"/a/", recursive=False) == [b"a", b"a/b", b"a/b.txt"]
    assert await ls(b"a/b/c") == [b"a/b/c"]
    for missing in (b"none", b"a/b/c/d", b"a/bb"):
        with pytest.raises(SnapshotError) as caught:
            await ls(missing)
        assert caught.value.code == Code.INVALID_REQUEST


async def test_ls_of_a_tree_of_many_pages_is_complete(memory_repo: Repository, make: Make) -> None:
    work = make({f"d{n % 7}/f{n:04}": str(n) for n in range(1500)})
    checkpoint = await memory_repo.capture(work, thread_id="t")
    assert len([e async for e in memory_repo.ls(checkpoint)]) == 1500 + 7 + 1
    for folder in range(7):
        found = [e.path async for e in memory_repo.ls(checkpoint, b"d%d" % folder)]
        assert len(found) == 1 + len(range(folder, 1500, 7))
    assert await memory_repo.read_file(checkpoint, b"d3/f0010") == b"10"


async def test_files_are_read_and_nothing_else_is(memory_repo: Repository, make: Make) -> None:
    """Links are not followed; folders and paths that are not there are typed errors."""
    big = os.urandom(9_000_000)
    work = make({"a": "1", "big": big, "empty": "", "folder/": ""})
    (work / "link").symlink_to("a")
    os.link(work / "a", work / "linked")
    checkpoint = await memory_repo.capture(work, thread_id="t")
    assert await memory_repo.read_file(checkpoint, b"big") == big
    assert max([len(piece) async for piece in memory_repo.open_file(checkpoint, b"big")]) <= 4 << 20
    assert await memory_repo.read_file(checkpoint, b"empty") == b""
    assert await memory_repo.read_file(checkpoint, b"/linked") == b"1"
    for path in (b"link", b"folder", b"", b"none", b"../a"):
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.read_file(checkpoint, path)
        assert caught.value.code == Code.INVALID_REQUEST


async def test_diff_names_exactly_what_differs(memory_repo: Repository, work: Path) -> None:
    """Against the truth of two listings, in both directions, over steps that change all kinds of entry."""
    make_tree(work, files=100, seed=6)
    checkpoints = []
    for seed in range(4):
        checkpoints.append(await memory_repo.capture(work, thread_id="t"))
        mutate_tree(work, seed=seed)
    for a in checkpoints:
        for b in checkpoints:
            before = {e.path: e async for e in memory_repo.ls(a)}
            after = {e.path: e async for e in memory_repo.ls(b)}
            found = await memory_repo.diff(a, b)
            assert [d.path for d in found.added] == [path for path in after if path not in before]
            assert [d.path for d in found.removed] == [path for path in before if path not in after]
            changed = {d.path for d in found.changed}
            for path in before.keys() & after.keys():
                old, new = before[path], after[path]
                differs = (old.kind, old.mode, old.chunks, old.target, old.hardlink) != (
                    new.kind,
                    new.mode,
                    new.chunks,
                    new.target,
                    new.hardlink,
                ) or (old.kind != 1 and old.mtime_ns != new.mtime_ns)
                assert (path in changed) == differs, path


async def test_diff_of_equal_checkpoints_is_empty_also_across_threads(memory_repo: Repository, thread: list[Checkpoint]) -> None:
    fork = await memory_repo.fork("t", thread[2].id, to_thread_id="u")
    found = await memory_repo.diff(thread[2], fork)
    assert (found.added, found.changed, found.removed) == ((), (), ())


async def test_a_root_has_to_be_named_when_there_are_several(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    one, two = make({"a": "1"}, base=tmp_path / "one"), make({"a": "2"}, base=tmp_path / "two")
    checkpoint = await memory_repo.capture(one, thread_id="t", roots={"one": str(one), "two": str(two)})
    assert await memory_repo.read_file(checkpoint, b"a", root="two") == b"2"
    assert [e.path async for e in memory_repo.ls(checkpoint, root="one")] == [b"", b"a"]
    for root in (None, "three"):
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.read_file(checkpoint, b"a", root=root)
        assert caught.value.code == Code.INVALID_REQUEST
    (two / "a").write_text("3")
    after = await memory_repo.capture(one, thread_id="t", roots={"one": str(one), "two": str(two)})
    assert [(d.root, d.path) for d in (await memory_repo.diff(checkpoint, after)).changed] == [("two", b"a")]
    alone = await memory_repo.capture(one, thread_id="t", roots={"one": str(one)})
    assert [(d.root, d.path) for d in (await memory_repo.diff(after, alone)).removed] == [("two", b""), ("two", b"a")]
