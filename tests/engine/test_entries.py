"""What is kept: every kind of entry comes back as it was, into another folder and over the one it came from."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapcore.model import Entry
from snapcore.providers.folders import FOLDER_FLAGS, FolderCache, remove_tree
from snapcore.repository import Repository
from snapcore.selection import FilePolicy
from snapcore.testing.trees import compare_trees, make_tree

Make = Callable[..., Path]
DEPTH = 2200


async def round_trip(repo: Repository, work: Path) -> Path:
    """Capture `work` and restore it beside itself."""
    target = work.parent / "target"
    await repo.capture(work, thread_id="t", policy=FilePolicy.everything())
    await repo.restore(target, thread_id="t")
    return target


def nothing(name: bytes) -> bool:
    return False


async def test_a_realistic_tree_comes_back_exactly(repo: Repository, work: Path) -> None:
    """Cases 14 to 17, 39: odd names, empty folders, times, hard links and old files, all in one tree."""
    make_tree(work, files=60, seed=4)
    target = await round_trip(repo, work)
    assert compare_trees(work, target, excluded=nothing, folder_times=True) == []


@pytest.mark.parametrize("mode", [0o755, 0o600, 0o444, 0o000, 0o777, 0o711, 0o1777, 0o640])
async def test_permission_bits_of_files_come_back(memory_repo: Repository, work: Path, mode: int) -> None:
    """Case 12: the executable bit and all others."""
    (work / "file").write_text("x")
    (work / "file").chmod(mode)
    target = await round_trip(memory_repo, work)
    assert stat.S_IMODE((target / "file").lstat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o555, 0o1777, 0o000, 0o711])
@pytest.mark.parametrize("name", ["folder", "."])
async def test_permission_bits_of_folders_and_of_the_root_come_back(
    memory_repo: Repository, work: Path, mode: int, name: str
) -> None:
    """Case 12, of folders: an empty one, a full one, and the root itself."""
    (work / "folder").mkdir()
    (work / "folder" / "file").write_text("x")
    (work / name).chmod(mode)
    target = await round_trip(memory_repo, work)
    assert stat.S_IMODE((target / name).lstat().st_mode) == mode
    assert (target / "folder" / "file").read_text() == "x"


@pytest.mark.parametrize(
    "mtime_ns",
    [
        0,
        1,
        999_999_999,
        -1,
        -1_000_000_001,
        -1_500_000_000,
        499_162_500_000_000_000,
        1_700_000_000_123_456_789,
        4_102_444_800 * 10**9,
    ],
)
async def test_modification_times_come_back_to_the_nanosecond(memory_repo: Repository, make: Make, mtime_ns: int) -> None:
    """Cases 16 and 39: restored mtimes are those captured, also before 1970, so that no build starts afresh."""
    work = make({"file": "x", "folder/inner": "y"})
    (work / "link").symlink_to("file")
    for name in ("folder/inner", "file", "link", "folder"):
        os.utime(work / name, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
    target = await round_trip(memory_repo, work)
    for name in ("folder/inner", "file", "link", "folder"):
        assert (target / name).lstat().st_mtime_ns == mtime_ns, name


NAMES = [
    b"caf\xe9",
    b"\xff\xfe\x80",
    b"new\nline",
    b"tab\tcarriage\rreturn",
    b"\x01\x1b[31mred\x7f",
    b" leading and trailing ",
    b"-rf",
    b"*?[a]",
    b"back\\slash",
    "naïve 文 🙂".encode(),
    b"e\xcc\x81",  # decomposed: not the same name as the composed one
    b"\xc3\xa9",
    b"x" * 255,
    b"...",
    b"CON",
    b"'\"$(touch x)",
]


async def test_names_come_back_as_bytes(memory_repo: Repository, work: Path) -> None:
    """Case 14: names that are not UTF-8, hold newlines or control characters, or differ in normal form only."""
    root = os.fsencode(work)
    for name in NAMES:
        os.mkdir(root + b"/" + name)
        Path(os.fsdecode(root + b"/" + name + b"/" + name)).write_bytes(name)
        os.symlink(name, root + b"/" + name + b"/link")
    target = os.fsencode(await round_trip(memory_repo, work))
    assert sorted(os.listdir(target)) == sorted(NAMES)
    for name in NAMES:
        assert os.readlink(target + b"/" + name + b"/link") == name
        assert Path(os.fsdecode(target + b"/" + name + b"/" + name)).read_bytes() == name


async def test_names_that_sort_around_the_separator_stay_apart(memory_repo: Repository, make: Make) -> None:
    """`a`, `a b`, `a-b`, `a.b`, `a/b`, `a0`: walk order and byte order differ here."""
    spec = {f"a{c}x/f": c for c in " !-.0~"} | {"a/f": "1", "a/x/f": "2"}
    work = make(spec)
    target = await round_trip(memory_repo, work)
    assert compare_trees(work, target) == []


async def test_empty_folders_and_empty_files_are_kept(memory_repo: Repository, make: Make) -> None:
    """Case 15: empty folders at any depth, the last in their folder and beside others."""
    work = make({"empty/": "", "deep/er/empty/": "", "full/file": "x", "full/empty/": "", "nothing": ""})
    target = await round_trip(memory_repo, work)
    assert compare_trees(work, target, folder_times=True) == []
    assert (target / "deep" / "er" / "empty").is_dir()
    assert (target / "nothing").stat().st_size == 0


async def test_an_empty_workspace_is_a_checkpoint(memory_repo: Repository, work: Path) -> None:
    checkpoint = await memory_repo.capture(work, thread_id="t")
    assert (checkpoint.totals.files, checkpoint.totals.folders, checkpoint.totals.bytes) == (0, 0, 0)
    receipt = await memory_repo.restore(work.parent / "target", thread_id="t")
    assert receipt is not None
    assert os.listdir(work.parent / "target") == []


@pytest.mark.parametrize("size", [1, 262_143, 262_144, 262_145, 4 << 20, (4 << 20) + 1, 9 << 20])
async def test_contents_of_any_size_come_back(memory_repo: Repository, make: Make, size: int) -> None:
    """Sizes around the limits of chunks and of reads."""
    data = (b"%d" % size) * (size // 3 + 1)
    work = make({"file": data[:size], "random": os.urandom(size)})
    target = await round_trip(memory_repo, work)
    assert compare_trees(work, target) == []


async def test_the_same_content_is_stored_once_wherever_it_is(memory_repo: Repository, make: Make) -> None:
    data = os.urandom(1 << 20)
    work = make({"a": data, "b": data, "c/d": data})
    report = await memory_repo.capture_with_report(work, thread_id="t")
    assert (1 << 20) < report.bytes_stored < (1 << 20) + 10_000
    again = await memory_repo.capture_with_report(make({"e": data}, base=work.parent / "other"), thread_id="u")
    assert again.bytes_stored < 5_000


async def test_sparse_files_stay_sparse(memory_repo: Repository, work: Path) -> None:
    """A hole at the start, in the middle, at the end, and nothing but a hole."""
    size = 12 << 20
    for name, places in {"start": [size - 3], "middle": [0, size - 3], "end": [0], "all": []}.items():
        (work / name).touch()
        os.truncate(work / name, size)
        fd = os.open(work / name, os.O_WRONLY)
        for place in places:
            os.pwrite(fd, b"abc", place)
        os.close(fd)
    target = await round_trip(memory_repo, work)
    for name in os.listdir(work):
        assert (target / name).read_bytes() == (work / name).read_bytes()
        assert (target / name).stat().st_blocks * 512 < 3 << 20, name


@pytest.fixture
def deep(work: Path) -> Iterator[Path]:
    """Nested folders, each with a file; longer than PATH_MAX in all. Removed afterwards: neither pytest nor shutil can."""
    fd = os.open(work, FOLDER_FLAGS)
    for level in range(DEPTH):
        file = os.open("f", os.O_CREAT | os.O_WRONLY, 0o640, dir_fd=fd)
        os.write(file, b"%d" % level)
        os.close(file)
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", FOLDER_FLAGS, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    yield work
    with FolderCache(os.open(work.parent, FOLDER_FLAGS)) as folders:
        for name in (b"work", b"target"):
            remove_tree(folders, name)


async def test_paths_longer_than_path_max_round_trip(memory_repo: Repository, deep: Path) -> None:
    """Case 43: 2,200 nested folders are captured, listed, read, restored and found equal."""
    target = await round_trip(memory_repo, deep)
    checkpoint = await memory_repo.get("t")
    assert checkpoint is not None
    found: list[Entry] = [entry async for entry in memory_repo.ls(checkpoint)]
    assert len(found) == 2 * DEPTH + 1
    assert max(len(entry.path) for entry in found) > os.pathconf("/", "PC_PATH_MAX")
    assert await memory_repo.read_file(checkpoint, b"d/" * (DEPTH - 1) + b"f") == b"%d" % (DEPTH - 1)
    again = await memory_repo.restore(target, thread_id="t", verify="content")
    assert again is not None
    assert (again.added, again.changed, again.removed, again.unchanged) == (0, 0, 0, 2 * DEPTH + 1)


async def test_owners_and_setuid_come_back_only_when_asked_for(memory_repo: Repository, make: Make) -> None:
    """Restored as this user by default; with `owners=True` owners, setuid and setgid are those captured."""
    if os.geteuid() != 0:
        pytest.skip("only the superuser may give files away")
    work = make({"tool": "#!", "folder/data": "x"})
    os.symlink("tool", work / "link")
    for name in ("tool", "folder", "link"):
        os.chown(work / name, 1234, 4321, follow_symlinks=False)
    (work / "tool").chmod(0o6755)
    target = await round_trip(memory_repo, work)
    assert {(target / n).lstat().st_uid for n in ("tool", "folder", "link")} == {0}
    assert stat.S_IMODE((target / "tool").stat().st_mode) == 0o755
    receipt = await memory_repo.restore(target, thread_id="t", owners=True)
    assert receipt is not None
    assert receipt.differences == ()
    for name in ("tool", "folder", "link"):
        st = (target / name).lstat()
        assert (st.st_uid, st.st_gid) == (1234, 4321), name
    assert stat.S_IMODE((target / "tool").stat().st_mode) == 0o6755


async def test_a_dropped_setuid_bit_is_told(memory_repo: Repository, make: Make) -> None:
    """The receipt names what the target does not hold as captured."""
    work = make({"tool": "#!"})
    (work / "tool").chmod(0o4755)
    await memory_repo.capture(work, thread_id="t")
    receipt = await memory_repo.restore(work.parent / "target", thread_id="t")
    assert receipt is not None
    assert [path for path, _ in receipt.differences] == [b"tool"]
