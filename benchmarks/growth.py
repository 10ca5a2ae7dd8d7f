"""How cost grows: with files, with checkpoints of a thread, with threads, with the size of one file.

Each step is a command of its own, so that its peak memory is its own too; captures by the thousand are made in one process
(fill.py), and the last of them are measured.
"""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tools import SNAPCORE, Measure, measure

FILES: Final = (10_000, 100_000, 1_000_000)
CHECKPOINTS: Final = (100, 1_000, 10_000)
THREADS: Final = (100, 1_000, 10_000)
SIZES_MB: Final = (100, 1_000, 10_000)
THREAD: Final = ("--thread", "bench", "-q")

Table = dict[str, dict[str, dict[str, float]]]


def growth(work: Path, parts: list[str] | None = None) -> Table:
    """Seconds and peak MB of each work by size; `parts` are names of `PARTS`, all by default."""
    table: Table = {}
    for name in parts or list(PARTS):
        print(name, file=sys.stderr, flush=True)
        PARTS[name](work, table)
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


def _command(repository: Path, *args: str) -> Measure:
    return measure([SNAPCORE, *args, "--repo", str(repository)])


def _small_files(tree: Path, count: int) -> None:
    for number in range(count):
        folder = tree / f"d{number % 50}"
        folder.mkdir(exist_ok=True)
        (folder / f"file{number}.txt").write_bytes(b"content %d\n" % number * 50)


def _files(work: Path, table: Table) -> None:
    for count in FILES:
        repository, tree = _fresh(work)
        for folder in range(count // 100):
            path = tree / f"d{folder % 100}" / f"s{folder // 100}"
            path.mkdir(parents=True)
            for number in range(100):
                (path / f"file{number}.txt").write_bytes(b"content %d %d\n" % (folder, number) * 3)
        size = f"{count:,} files"
        _note(table, "first capture", size, _command(repository, "capture", str(tree), *THREAD))
        _note(table, "nothing changed", size, _command(repository, "capture", str(tree), *THREAD))
        (tree / "d5" / "s0" / "file5.txt").write_bytes(b"changed\n")
        _note(table, "one file changed", size, _command(repository, "capture", str(tree), *THREAD))
        _note(table, "restore", size, _command(repository, "restore", str(work / "out"), *THREAD))
        _note(table, "restore over the same tree", size, _command(repository, "restore", str(work / "out"), *THREAD))
        _note(table, "verify", size, _command(repository, "verify", "-q"))
        _note(table, "verify --read-data", size, _command(repository, "verify", "--read-data", "-q"))
        _note(table, "gc", size, _command(repository, "gc", "--grace", "0", "-q"))


def _many(kind: str, counts: tuple[int, ...]) -> Callable[[Path, Table], None]:
    def run(work: Path, table: Table) -> None:
        repository, tree = _fresh(work)
        _small_files(tree, 2_000 if kind == "checkpoints" else 100)
        done = 0
        for count in counts:
            size = f"{count:,} {kind}"
            fill = [sys.executable, str(Path(__file__).with_name("fill.py")), str(repository), str(tree)]
            found = subprocess.run([*fill, kind, str(done), str(count - done)], check=True, stdout=subprocess.PIPE, text=True)
            done = count
            _note(table, f"capture, one file changed, many {kind}", size, Measure(float(found.stdout), 0, 0))
            if kind == "checkpoints":
                _note(table, "list", size, _command(repository, "list", "--thread", "bench", "--json"))
                shutil.rmtree(work / "out", ignore_errors=True)
                _note(table, "restore of the head", size, _command(repository, "restore", str(work / "out"), *THREAD))
            else:
                _note(table, "threads", size, _command(repository, "threads", "--json"))
            _note(table, f"verify, many {kind}", size, _command(repository, "verify", "-q"))
            _note(table, f"gc, nothing to free, many {kind}", size, _command(repository, "gc", "--no-repack", "-q"))
        if kind == "checkpoints":
            size = f"{done:,} checkpoints"
            keep = ("--thread", "bench", "--keep-last", "10")
            _note(table, "forget all but 10", size, _command(repository, "forget", *keep, "-q"))
            _note(table, "gc after it", size, _command(repository, "gc", "--grace", "0", "-q"))
            shutil.rmtree(work / "out", ignore_errors=True)
            _note(table, "restore after both", size, _command(repository, "restore", str(work / "out"), *THREAD))

    return run


def _large_file(work: Path, table: Table) -> None:
    for mb in SIZES_MB:
        repository, tree = _fresh(work)
        rng = random.Random(mb)
        with (tree / "large.bin").open("wb") as out:
            for _ in range(mb // 10):
                out.write(rng.randbytes(10_000_000))
        size = f"{mb / 1000:g} GB"
        _note(table, "capture of one file", size, _command(repository, "capture", str(tree), *THREAD))
        with (tree / "large.bin").open("r+b") as out:
            out.seek(mb * 500_000)
            out.write(b"changed")
        _note(table, "the same with seven bytes changed", size, _command(repository, "capture", str(tree), *THREAD))
        _note(table, "restore of one file", size, _command(repository, "restore", str(work / "out"), *THREAD))
        _note(table, "verify --read-data of one file", size, _command(repository, "verify", "--read-data", "-q"))


PARTS: Final[dict[str, Callable[[Path, Table], None]]] = {
    "files": _files,
    "checkpoints": _many("checkpoints", CHECKPOINTS),
    "threads": _many("threads", THREADS),
    "bytes": _large_file,
}
