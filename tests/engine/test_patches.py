"""Patches: what `git apply` and `patch -p1` make of them, which secrets they do not show, how names are written."""

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import snapcore
from snapcore.patches import MAX_TEXT_BYTES, FilePatch, quoted_name
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


GIT = ("git", "apply", "--whitespace=nowarn", "-")
GNU = ("patch", "-p1", "-s", "--binary", "--no-backup-if-mismatch")

names = st.sampled_from([b"a", b"b", b"c", b"d e", b'q"t', b"caf\xe9", b"n\nl", b"tab\t", b"\xc3\xa9", b"a/x"])
plain_names = st.sampled_from([b"a", b"b", b"c", b"d/e", b"d/f", b"d", b"a/x", b"z.txt"])
lines = st.lists(st.sampled_from([b"one", b"two", b"", b"three\r", b"caf\xe9", b"-- x", b"\x1b[31m", b"@@ -1 +1 @@"]), max_size=30)
texts = st.builds(lambda parts, end: b"\n".join(parts) + (b"\n" if end and parts else b""), lines, st.booleans())
files = st.one_of(
    texts, texts.map(lambda t: ("program", t)), st.sampled_from([b"a", b"x/y", b"gone"]).map(lambda t: ("link", t))
)


def without_conflicts(tree: Tree) -> Tree:
    return {name: what for name, what in tree.items() if not any(other.startswith(name + b"/") for other in tree)}


def trees(of: st.SearchStrategy[bytes]) -> st.SearchStrategy[Tree]:
    return st.dictionaries(of, files, max_size=6).map(without_conflicts)


few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
        for command in (GIT, GNU):
            apply(patch, write_tree(a, tmp_path / "again"), *command)
            assert read_tree(tmp_path / "again") == b, command
