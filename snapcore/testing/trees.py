"""Trees as agents leave them: made from a seed, changed as a step of work changes them, and compared entry by entry."""

import os
import random
import sqlite3
import stat
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["compare_trees", "default_excluded", "make_tree", "mutate_tree"]

_OLD: Final = 499_162_500_000_000_000  # the one mtime that a package manager gives to all it extracts
_SUFFIXES: Final = ("py", "ts", "json", "md", "css", "lock")
_STEMS: Final = ("api", "core", "util", "view", "model", "route", "hook", "query", "theme", "parse", "index", "store")


def default_excluded(name: bytes) -> bool:
    """Names that a default policy leaves out and that the trees made here hold."""
    return name in (b"node_modules", b".git", b"__pycache__") or name.startswith(b".env")


def make_tree(root: str | os.PathLike[str], files: int = 200, seed: int = 1, big_bytes: int = 0) -> None:
    """Make a tree of about `files` small files below `root`, equal for equal arguments.

    Besides them: folders some levels deep, empty files and folders, executables, read-only files, files with one fixed
    old mtime, one from before 1970, hard links, links (to a file, a folder, a parent, nothing), names with spaces,
    newlines, dots and bytes that are not UTF-8, a long name, a SQLite database, folders that default policies leave
    out, and, when `big_bytes` is not 0, one incompressible file of that size.
    """
    rng = random.Random(seed)
    base = os.fsencode(root)
    os.makedirs(base, exist_ok=True)
    folders = [base]
    for number in range(max(3, files // 10)):
        parent = rng.choice(folders[-6:])
        if parent.count(b"/") > base.count(b"/") + 8:
            parent = base
        folders.append(os.path.join(parent, b"%s-%d" % (rng.choice(_STEMS).encode(), number)))
        os.mkdir(folders[-1])
    for number in range(files):
        name = f"{rng.choice(_STEMS)}{number}.{rng.choice(_SUFFIXES)}".encode()
        mode = 0o755 if number % 17 == 3 else 0o644
        _file(os.path.join(rng.choice(folders), name), _text(rng), mode, _OLD if number % 3 == 0 else None)
    _make_odd_entries(base, rng)
    if big_bytes:
        _file(base + b"/weights.bin", rng.randbytes(big_bytes))
    _database(base + b"/app.db", rng, rows=200)


def mutate_tree(root: str | os.PathLike[str], seed: int) -> None:
    """Change a tree that `make_tree` made, as one step of an agent does, equal for equal trees and seeds.

    Appends, rewrites, removes, renames and chmods a few files, edits one keeping its size and mtime, swaps a file for a
    folder and a folder for a link, adds a small tree, adds rows to the database.
    """
    rng = random.Random(seed)
    base = os.fsencode(root)
    found = [path for path in _regular(base) if os.lstat(path).st_nlink == 1 and os.access(path, os.W_OK)]
    grown, rewritten, removed, renamed, chmodded, edited, swapped = rng.sample(found, 7)
    with open(grown, "ab") as out:
        out.write(_text(rng))
    _file(rewritten, _text(rng))
    os.unlink(removed)
    os.rename(renamed, renamed + b".moved")
    os.chmod(chmodded, 0o700)
    _edit_unseen(edited)
    os.unlink(swapped)
    os.mkdir(swapped)
    _file(swapped + b"/inner.txt", b"was a file\n")
    _add_step_folder(base, b"/step-%d" % seed, rng)
    _database(base + b"/app.db", rng, rows=50)
    vacant = base + b"/empty/vacant"
    if os.path.isdir(vacant) and not os.path.islink(vacant):
        os.rmdir(vacant)
        os.symlink(b"../run.sh", vacant)


def compare_trees(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    excluded: Callable[[bytes], bool] = default_excluded,
    folder_times: bool = False,
) -> list[str]:
    """What differs between two trees, one line each, empty when nothing does.

    Compared are kinds, modes of files and folders, mtimes of files and links (of folders with `folder_times`), contents,
    link targets and hard-link groups. Names for which `excluded` is true are passed over in both.
    """
    first, second = (_describe(os.fsencode(root), excluded, folder_times) for root in (a, b))
    lines = []
    for path in sorted(first.keys() | second.keys()):
        one, two = first.get(path), second.get(path)
        if one is None or two is None:
            lines.append(f"{path!r}: only in the {'second' if one is None else 'first'}")
        else:
            lines += [
                f"{path!r}: {what} {one.get(what)!r} / {two.get(what)!r}"
                for what in sorted(one.keys() | two.keys())
                if one.get(what) != two.get(what)
            ]
    return lines


def _make_odd_entries(base: bytes, rng: random.Random) -> None:
    os.makedirs(base + b"/empty/nested/deeper")
    os.mkdir(base + b"/empty/vacant")
    _file(base + b"/nothing.txt", b"")
    _file(base + b"/run.sh", b"#!/bin/sh\nexit 0\n", 0o755)
    _file(base + b"/read-only.txt", b"look, do not touch\n", 0o444)
    _file(base + b"/before-1970.txt", b"old\n", mtime_ns=-1_500_000_001)
    _file(base + b"/zeros.img", bytes(300_000) + b"end")
    for name in (b"new\nline", b" spaced out ", b"-dash", b"caf\xe9 \xff", "naïve 文".encode(), b"a.b", b"x" * 255):
        _file(base + b"/" + name, name + b"\n")
    os.mkdir(base + b"/a")  # sorts before "a.b" in walk order, after it as plain bytes
    _file(base + b"/a/inside", b"1\n")
    os.mkdir(base + b"/private", 0o700)
    _file(base + b"/private/key", b"k\n", 0o600)
    os.mkdir(base + b"/sealed")
    _file(base + b"/sealed/note", b"n\n")
    os.chmod(base + b"/sealed", 0o555)
    for target, name in (
        (b"run.sh", b"to-file"),
        (b"a", b"to-folder"),
        (b"no/such/file", b"dangling"),
        (b"../..", b"empty/nested/up"),
        (b"to-file", b"chained"),
    ):
        os.symlink(target, base + b"/" + name)
    os.utime(base + b"/dangling", ns=(1_000_000_007, 1_000_000_007), follow_symlinks=False)
    os.link(base + b"/run.sh", base + b"/private/run-too.sh")
    os.link(base + b"/run.sh", base + b"/a/run-three.sh")
    os.makedirs(base + b"/node_modules/left/dist")
    _file(base + b"/node_modules/left/dist/index.js", b"module.exports = 1\n")
    _file(base + b"/.env", b"TOKEN=%d\n" % rng.getrandbits(64))
    _file(base + b"/a/.env.local", b"OTHER=1\n")


def _add_step_folder(base: bytes, name: bytes, rng: random.Random) -> None:
    os.makedirs(base + name + b"/sub/empty")
    for number in range(4):
        _file(base + name + b"/sub/out-%d.txt" % number, _text(rng))
    os.symlink(b"sub/out-0.txt", base + name + b"/latest")
    os.link(base + name + b"/sub/out-1.txt", base + name + b"/kept")


def _edit_unseen(path: bytes) -> None:
    """Change bytes but neither size nor mtime: only the ctime tells."""
    st = os.stat(path)
    with open(path, "r+b") as file:
        data = bytearray(file.read())
        data[0] ^= 0x55
        file.seek(0)
        file.write(data)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def _database(path: bytes, rng: random.Random, rows: int) -> None:
    connection = sqlite3.connect(os.fsdecode(path))
    try:
        with connection:
            connection.execute("create table if not exists runs (id integer primary key, name text, body blob)")
            connection.executemany(
                "insert into runs (name, body) values (?, ?)",
                [(rng.choice(_STEMS), rng.randbytes(90)) for _ in range(rows)],
            )
    finally:
        connection.close()


def _text(rng: random.Random) -> bytes:
    lines = (f"{rng.choice(_STEMS)} = {rng.choice(_STEMS)}({rng.getrandbits(40):x})\n" for _ in range(rng.randrange(1, 60)))
    return "".join(lines).encode()


def _file(path: bytes, data: bytes, mode: int = 0o644, mtime_ns: int | None = None) -> None:
    with open(path, "wb") as out:
        out.write(data)
    os.chmod(path, mode)
    if mtime_ns is not None:
        os.utime(path, ns=(mtime_ns, mtime_ns))


def _regular(base: bytes) -> Iterator[bytes]:
    """Regular files with content that `mutate_tree` may change, sorted."""
    for folder, folders, names in os.walk(base):
        folders[:] = sorted(name for name in folders if not default_excluded(name) and name not in (b"private", b"sealed"))
        for name in sorted(names):
            path = os.path.join(folder, name)
            st = os.lstat(path)
            if stat.S_ISREG(st.st_mode) and st.st_size and name.rpartition(b".")[2].decode("latin-1") in _SUFFIXES:
                yield path


def _describe(base: bytes, excluded: Callable[[bytes], bool], folder_times: bool) -> dict[bytes, dict[str, object]]:
    out: dict[bytes, dict[str, object]] = {}
    groups: dict[tuple[int, int], bytes] = {}
    pending = [b""]
    while pending:
        path = pending.pop()
        full = os.path.join(base, path) if path else base
        st = os.lstat(full)
        entry: dict[str, object] = {"kind": stat.filemode(st.st_mode)[0]}
        out[path] = entry
        if stat.S_ISLNK(st.st_mode):
            entry.update(target=os.readlink(full), mtime=st.st_mtime_ns)
        elif stat.S_ISDIR(st.st_mode):
            entry["mode"] = oct(st.st_mode & 0o7777)
            if folder_times:
                entry["mtime"] = st.st_mtime_ns
            names = sorted((name for name in os.listdir(full) if not excluded(name)), reverse=True)
            pending += [path + b"/" + name if path else name for name in names]
        elif stat.S_ISREG(st.st_mode):
            entry.update(mode=oct(st.st_mode & 0o7777), mtime=st.st_mtime_ns)
            with open(full, "rb") as file:
                entry["content"] = file.read()
            if st.st_nlink > 1:
                # walk order makes the first member the same in two trees that are equal
                entry["group"] = groups.setdefault((st.st_dev, st.st_ino), path)
    return out
