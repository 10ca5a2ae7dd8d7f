"""Patches: what `git apply` and `patch -p1` make of them, which secrets they do not show, how names are written."""

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import snapcore
from snapcore import linediff
from snapcore.errors import Code, SnapshotError
from snapcore.linediff import changed_blocks
from snapcore.patches import MAX_TEXT_BYTES
from snapcore.patchtext import MAX_TEXT_LINES, FilePatch, quoted_name
from snapcore.repository import Repository

Make = Callable[..., Path]
Tree = dict[bytes, bytes | tuple[str, bytes]]  # name -> content, or ("link", target), or ("program", content)


def write_tree(tree: Tree, root: Path) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, what in tree.items():
        path = os.path.join(os.fsencode(root), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        kind, content = what if isinstance(what, tuple) else ("file", what)
        if kind == "link":
            os.symlink(content, path)
            continue
        with open(path, "wb") as file:
            file.write(content)
        os.chmod(path, 0o755 if kind == "program" else 0o644)
    return root


def read_tree(root: Path) -> Tree:
    out: Tree = {}
    for base, folders, files in os.walk(os.fsencode(root)):
        for name in files + folders:
            path = os.path.join(base, name)
            st_ = os.lstat(path)
            key = os.path.relpath(path, os.fsencode(root))
            if stat.S_ISLNK(st_.st_mode):
                out[key] = ("link", os.readlink(path))
            elif stat.S_ISREG(st_.st_mode):
                with open(path, "rb") as file:
                    data = file.read()
                out[key] = ("program", data) if st_.st_mode & 0o100 else data
    return out


async def patch_of(repo: Repository, a: Tree, b: Tree, base: Path) -> bytes:
    """The patch between two trees, after the first was restored into `base / "out"`."""
    work = base / "work"
    policy = snapcore.FilePolicy.everything()
    before = await repo.capture(write_tree(a, work), thread_id="t", policy=policy)
    shutil.rmtree(base / "out", ignore_errors=True)
    (base / "out").mkdir()
    await repo.restore(base / "out", thread_id="t", checkpoint_id=before.id, allow_empty=True)
    after = await repo.capture(write_tree(b, work), thread_id="t", policy=policy)
    found = await repo.diff(before, after)
    stored = b"".join([p.data async for p in repo.patches(found, before, after)])
    live = await repo.compare(before, work)
    assert b"".join([p.data async for p in repo.patches(live, before, work)]) == stored
    return stored


def apply(patch: bytes, root: Path, *command: str) -> None:
    if not patch:
        return
    done = subprocess.run([*command], cwd=root, input=patch, capture_output=True, check=False)
    assert done.returncode == 0, (done, patch)


def git_diff(a: Tree, b: Tree, base: Path) -> bytes:
    """What git itself writes, without its `index` and the lines it names behind `@@`."""
    write_tree(a, base / "a")
    write_tree(b, base / "b")
    command = ["git", "diff", "--no-index", "--no-prefix", "--abbrev=7", "a", "b"]
    patch = subprocess.run(command, cwd=base, capture_output=True, check=False).stdout
    return re.sub(rb"(?m)^(@@ [^@]+ @@).*$", rb"\1", re.sub(rb"(?m)^index .*\n", b"", patch))


def refused_by_git(patch: bytes, root: Path) -> bool:
    return subprocess.run([*GIT], input=patch, cwd=root, capture_output=True, check=False).returncode != 0


GIT = ("git", "apply", "--whitespace=nowarn", "-")
GNU = ("patch", "-p1", "-s", "--binary", "--no-backup-if-mismatch")

names = st.sampled_from([b"a", b"b", b"c", b"d e", b'q"t', b"caf\xe9", b"n\nl", b"tab\t", b"\xc3\xa9", b"a/x"])
plain_names = st.sampled_from([b"a", b"b", b"c", b"d/e", b"d/f", b"d", b"a/x", b"z.txt"])
lines = st.lists(
    st.sampled_from([b"one", b"two", b"", b"three\r", b"caf\xe9", b"-- x", b"\x1b[31m", b"@@ -1 +1 @@"]), max_size=30
)
texts = st.builds(lambda parts, end: b"\n".join(parts) + (b"\n" if end and parts else b""), lines, st.booleans())
files = st.one_of(
    texts, texts.map(lambda t: ("program", t)), st.sampled_from([b"nowhere", b"x/y", b"gone"]).map(lambda t: ("link", t))
)


def without_conflicts(tree: Mapping[bytes, bytes | tuple[str, bytes]]) -> Tree:
    return {name: what for name, what in tree.items() if not any(other.startswith(name + b"/") for other in tree)}


def trees(of: st.SearchStrategy[bytes]) -> st.SearchStrategy[Tree]:
    return st.dictionaries(of, files, max_size=6).map(without_conflicts)


few = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@few
@given(a=trees(names), b=trees(names))
async def test_git_makes_the_later_tree_of_the_earlier_whatever_the_names(tmp_path: Path, a: Tree, b: Tree) -> None:
    async with snapcore.open_repository("memory://") as repo:
        apply(await patch_of(repo, a, b, tmp_path), tmp_path / "out", *GIT)
        assert read_tree(tmp_path / "out") == b


@few
@given(a=trees(plain_names), b=trees(plain_names))
async def test_git_and_gnu_patch_make_the_later_tree_of_the_earlier(tmp_path: Path, a: Tree, b: Tree) -> None:
    async with snapcore.open_repository("memory://") as repo:
        patch = await patch_of(repo, a, b, tmp_path)
        # GNU patch removes links last, so that it cannot put a folder in the place of one
        links = [what for what in (*a.values(), *b.values()) if isinstance(what, tuple) and what[0] == "link"]
        for command in (GIT,) if links else (GIT, GNU):
            apply(patch, write_tree(a, tmp_path / "again"), *command)
            assert read_tree(tmp_path / "again") == b, command


async def test_gnu_patch_takes_links(tmp_path: Path, memory_repo: Repository) -> None:
    a: Tree = {b"changed": ("link", b"x"), b"gone": ("link", b"x"), b"same": ("link", b"x"), b"file": b"x\n"}
    b: Tree = {b"changed": ("link", b"y/z"), b"new": ("link", b"y"), b"same": ("link", b"x"), b"file": b"y\n"}
    apply(await patch_of(memory_repo, a, b, tmp_path), tmp_path / "out", *GNU)
    assert read_tree(tmp_path / "out") == b


# ---- what is written, in detail


async def between(repo: Repository, a: Tree, b: Tree, base: Path) -> list[FilePatch]:
    """The patches between two trees that are captured one after the other."""
    before = await repo.capture(write_tree(a, base / "work"), thread_id="t")
    after = await repo.capture(write_tree(b, base / "work"), thread_id="t")
    return [p async for p in repo.patches(await repo.diff(before, after), before, after)]


async def test_a_change_looks_as_git_shows_it(memory_repo: Repository, tmp_path: Path) -> None:
    lines = [b"line %d\n" % n for n in range(20)]
    other = [*lines[:2], b"new\n", *lines[2:15], b"changed\n", *lines[16:]]
    other[-1] = b"line 19"
    (patch,) = await between(memory_repo, {b"a": b"".join(lines)}, {b"a": b"".join(other)}, tmp_path)
    assert (patch.added, patch.removed, patch.why) == (3, 2, "")
    assert patch.data == git_diff({b"a": b"".join(lines)}, {b"a": b"".join(other)}, tmp_path)
    assert patch.data.endswith(b"\n-line 19\n+line 19\n\\ No newline at end of file\n")


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        (b"plain/x y.txt", b"plain/x y.txt"),
        (b'q"b\\', b'"q\\"b\\\\"'),
        (b"\n\t\r\x1b\x7f", b'"\\n\\t\\r\\033\\177"'),
        ("é".encode(), b'"\\303\\251"'),
        (b"\xe9", b'"\\351"'),
    ],
)
def test_names_are_quoted_as_git_quotes_them(name: bytes, quoted: bytes) -> None:
    assert quoted_name(name) == quoted


async def test_what_takes_a_folders_place_comes_after_what_was_in_it(memory_repo: Repository, tmp_path: Path) -> None:
    found = await between(memory_repo, {b"x/a": b"1\n", b"y": b"2\n"}, {b"x": b"3\n", b"y/b": b"4\n"}, tmp_path)
    headers = [line for p in found for line in p.data.split(b"\n") if line.startswith((b"new file", b"deleted", b"diff"))]
    assert headers == [
        b"diff --git a/x/a b/x/a",
        b"deleted file mode 100644",
        b"diff --git a/x b/x",
        b"new file mode 100644",
        b"diff --git a/y b/y",
        b"deleted file mode 100644",
        b"diff --git a/y/b b/y/b",
        b"new file mode 100644",
    ]


async def test_what_is_no_text_or_large_is_only_told_to_differ(memory_repo: Repository, tmp_path: Path) -> None:
    large = b"x\n" * (MAX_TEXT_BYTES // 2) + b"y"
    many = b"\n" * (MAX_TEXT_LINES + 1)
    a: Tree = {b"bin": b"a\0", b"large": large, b"late": b"a" * 8_000 + b"\0\n", b"many": many}
    b: Tree = {b"bin": b"b\0\n", b"large": b"small\n", b"late": b"b" * 8_000 + b"\0\n", b"many": many + b"\n", b"new": b"\0"}
    found = {p.entry.path: p for p in await between(memory_repo, a, b, tmp_path)}
    assert [p.why for p in found.values()] == ["binary", "too large", "", "too large", "binary"]
    assert found[b"bin"].data.endswith(b"\nBinary files a/bin and b/bin differ\n")
    assert found[b"new"].data.endswith(b"\nBinary files /dev/null and b/new differ\n")
    assert found[b"large"].data.endswith(b"\nFiles a/large (%d bytes) and b/large (6 bytes) differ\n" % len(large))
    assert (found[b"large"].added, found[b"large"].removed) == (None, None)
    assert found[b"late"].data.count(b"\0") == 2  # as git, which looks at the beginning only
    for patch in (found[b"bin"], found[b"large"]):  # nothing is left out silently
        assert refused_by_git(patch.data, tmp_path / "work")


async def test_only_the_execute_bit_is_in_a_patch(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "x", "b": "x", "f/": ""})
    for name in ("a", "b"):
        (work / name).chmod(0o644)
    before = await memory_repo.capture(work, thread_id="t")
    (work / "a").chmod(0o600)
    (work / "b").chmod(0o750)
    (work / "f").chmod(0o700)
    found = await memory_repo.compare(before, work)
    assert {p.entry.path: p.data async for p in memory_repo.patches(found, before, work)} == {
        b"a": b"",
        b"b": b"diff --git a/b b/b\nold mode 100644\nnew mode 100755\n",
        b"f": b"",
    }


async def test_a_text_with_a_redacted_secret_is_a_text_and_the_patch_fits(memory_repo: Repository, tmp_path: Path) -> None:
    secrets = {"TOKEN": "hunter2-hunter2"}
    work = write_tree({b"conf": b"a\ntoken=hunter2-hunter2\nz\n"}, tmp_path / "work")
    before = await memory_repo.capture(work, thread_id="t", secrets=secrets)
    write_tree({b"conf": b"a\nb\ntoken=hunter2-hunter2\nkey=hunter2-hunter2\nz\n"}, work)
    after = await memory_repo.capture(work, thread_id="t", secrets=secrets)
    stored = [p async for p in memory_repo.patches(await memory_repo.diff(before, after), before, after)]
    live = await memory_repo.compare(before, work, secrets=secrets)
    assert [p.data async for p in memory_repo.patches(live, before, work, secrets=secrets)] == [p.data for p in stored]
    assert (stored[0].added, stored[0].why) == (2, "")
    assert b"hunter2" not in stored[0].data
    (tmp_path / "out").mkdir()
    for command in (GIT, GNU):
        await memory_repo.restore(tmp_path / "out", thread_id="t", checkpoint_id=before.id)
        apply(stored[0].data, tmp_path / "out", *command)
        assert read_tree(tmp_path / "out") == {b"conf": b"a\nb\ntoken=%s\nkey=%s\nz\n" % (bytes(15), bytes(15))}


async def test_a_live_file_that_went_away_is_told(memory_repo: Repository, make: Make) -> None:
    before = await memory_repo.capture(make({"a": "x"}), thread_id="t")
    work = make({"a": "y, longer"})
    found = await memory_repo.compare(before, work)
    (work / "a").unlink()
    (patch,) = [p async for p in memory_repo.patches(found, before, work)]
    assert (patch.why, patch.added) == ("vanished", None)
    assert patch.data.endswith(b"Files a/a (1 bytes) and b/a (9 bytes) differ\n")


async def test_the_lines_that_differ_are_few_and_the_work_is_bounded() -> None:
    numbers = [b"%d" % (n * n % 1_009) for n in range(60_000)]
    for other in (numbers[::-1], [*numbers[30_000:], *numbers[:30_000]], numbers[::2]):
        blocks = changed_blocks(numbers, other)
        made = [*numbers]
        for block in reversed(blocks):
            made[block.a1 : block.a2] = other[block.b1 : block.b2]
        assert made == other
    assert changed_blocks([b"a", b"b", b"c"], [b"a", b"x", b"c"]) == [(1, 2, 1, 2)]
    assert changed_blocks([b"a"], [b"a"]) == []


def test_large_changes_are_divided_at_lines_that_both_sides_have_once() -> None:
    first, second = ([line for n in range(700) for line in (b"%s %d" % (name, n), b"{", b"old")] for name in (b"f", b"g"))
    blocks = changed_blocks([*first, *second], [b"new" if line == b"old" else line for line in (*first, *second)])
    assert [tuple(block) for block in blocks] == [(at, at + 1, at, at + 1) for at in range(2, 4_200, 3)]
    before, after = [*first, *second], [*second, *first[:-3]]  # the order is another: only one of them can stay
    blocks = changed_blocks(before, after)
    assert sum(k.a2 - k.a1 + k.b2 - k.b1 for k in blocks) == 2_100 + 2_097
    for block in reversed(blocks):
        before[block.a1 : block.a2] = after[block.b1 : block.b2]
    assert before == after


def test_what_takes_too_much_work_counts_as_changed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = [b"{", b"old"] * 100, [b"{", b"new"] * 100
    assert len(changed_blocks(before, after)) == 100
    monkeypatch.setattr(linediff, "WORK", 1_000)
    assert [tuple(block) for block in changed_blocks(before, after)] == [(1, 200, 1, 200)]


@settings(max_examples=200, deadline=None)
@given(
    a=st.lists(st.sampled_from([b"1", b"2", b"3", b"4"]), max_size=9), b=st.lists(st.sampled_from([b"1", b"2", b"3"]), max_size=9)
)
def test_no_shorter_difference_exists(a: list[bytes], b: list[bytes]) -> None:
    common = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            common[i + 1][j + 1] = common[i][j] + 1 if x == y else max(common[i][j + 1], common[i + 1][j])
    blocks = changed_blocks(a, b)
    assert sum(k.a2 - k.a1 + k.b2 - k.b1 for k in blocks) == len(a) + len(b) - 2 * common[-1][-1]
    made = [*a]
    for block in reversed(blocks):
        made[block.a1 : block.a2] = b[block.b1 : block.b2]
    assert made == b


async def test_a_patch_against_a_sandbox_needs_a_checkpoint(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "one"})
    found = await memory_repo.compare(await memory_repo.capture(work, thread_id="t"), work)
    with pytest.raises(SnapshotError) as caught:
        _ = [p async for p in memory_repo.patches(found, None, work)]
    assert caught.value.code == Code.INVALID_REQUEST
