"""How cost grows: with the number of files, with the number of checkpoints, with the size of one file.

Each step is a command of its own, so that its peak memory is its own too.
"""

import random
import shutil
from pathlib import Path

from tools import SNAPCORE, Measure, measure

FILES = (10_000, 100_000, 1_000_000)
CHECKPOINTS = (1, 100, 1_000)
SIZES_MB = (100, 1_000, 10_000)
THREAD = ("--thread", "growth", "-q")

Table = dict[str, dict[str, dict[str, float]]]


def growth(work: Path) -> Table:
    """All of it, as a table of seconds and peak MB."""
    table: Table = {}
    _files(work, table)
    _checkpoints(work, table)
    _large_file(work, table)
    return table


def _note(table: Table, work: str, size: str, found: Measure) -> None:
    table.setdefault(work, {})[size] = {"seconds": round(found.seconds, 2), "peak_mb": round(found.peak_mb, 1)}


def _fresh(work: Path) -> tuple[Path, Path]:
    repository, tree = work / "repository", work / "tree"
    for folder in (repository, tree, work / "out"):
        shutil.rmtree(folder, ignore_errors=True)
    tree.mkdir()
    measure([SNAPCORE, "init", "--repo", str(repository)])
    return repository, tree


def _capture(repository: Path, tree: Path) -> Measure:
    return measure([SNAPCORE, "capture", str(tree), "--repo", str(repository), *THREAD])


def _restore(repository: Path, out: Path) -> Measure:
    return measure([SNAPCORE, "restore", str(out), "--repo", str(repository), *THREAD])


def _files(work: Path, table: Table) -> None:
    for count in FILES:
        repository, tree = _fresh(work)
        for folder in range(count // 100):
            path = tree / f"d{folder % 100}" / f"s{folder // 100}"
            path.mkdir(parents=True)
            for number in range(100):
                (path / f"file{number}.txt").write_bytes(b"content %d %d\n" % (folder, number) * 3)
        size = f"{count:,} files"
        _note(table, "first capture", size, _capture(repository, tree))
        _note(table, "nothing changed", size, _capture(repository, tree))
        (tree / "d5" / "s0" / "file5.txt").write_bytes(b"changed\n")
        _note(table, "one file changed", size, _capture(repository, tree))
        _note(table, "restore", size, _restore(repository, work / "out"))
        _note(table, "restore over the same tree", size, _restore(repository, work / "out"))


def _checkpoints(work: Path, table: Table) -> None:
    repository, tree = _fresh(work)
    for number in range(2_000):
        folder = tree / f"d{number % 50}"
        folder.mkdir(exist_ok=True)
        (folder / f"file{number}.txt").write_bytes(b"content %d\n" % number * 50)
    done = 0
    for count in CHECKPOINTS:
        while done < count:
            target = tree / f"d{done % 50}" / f"file{done % 2_000}.txt"
            target.write_bytes(b"changed %d\n" % done * 50)
            _note(table, "one file changed, 2,000 files", f"{count:,} checkpoints", _capture(repository, tree))
            done += 1
        size = f"{count:,} checkpoints"
        _note(table, "list", size, measure([SNAPCORE, "list", "--repo", str(repository), "--thread", "growth", "--json"]))
        shutil.rmtree(work / "out", ignore_errors=True)
        _note(table, "restore of the head", size, _restore(repository, work / "out"))
        _note(table, "verify", size, measure([SNAPCORE, "verify", "--repo", str(repository), "-q"]))


def _large_file(work: Path, table: Table) -> None:
    for mb in SIZES_MB:
        repository, tree = _fresh(work)
        rng = random.Random(mb)
        with (tree / "large.bin").open("wb") as out:
            for _ in range(mb // 10):
                out.write(rng.randbytes(10_000_000))
        size = f"{mb / 1000:g} GB"
        _note(table, "capture of one file", size, _capture(repository, tree))
        with (tree / "large.bin").open("r+b") as out:
            out.seek(mb * 500_000)
            out.write(b"changed")
        _note(table, "the same with seven bytes changed", size, _capture(repository, tree))
        _note(table, "restore of one file", size, _restore(repository, work / "out"))
