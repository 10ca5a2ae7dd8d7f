"""Fills a repository with many captures in one process, for growth.py:

    python benchmarks/fill.py REPOSITORY TREE checkpoints FIRST COUNT   one thread, one file changed before each
    python benchmarks/fill.py REPOSITORY TREE threads FIRST COUNT       a thread each, one file changed before each

A database that is not the repository's own comes last. Prints the median seconds of the last captures.
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path

import snapcore

LAST = 50
THREAD = "bench"


async def fill(repository: str, tree: Path, kind: str, first: int, count: int, database: str | None = None) -> float:
    """Capture `count` times; the median seconds of the last captures."""
    files = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink() and path.stat().st_size < 100_000)
    seconds = []
    async with snapcore.open_repository(repository, database=database) as repo:
        for number in range(first, first + count):
            files[number % len(files)].write_bytes(b"changed %d\n" % number * 50)
            start = time.perf_counter()
            await repo.capture(str(tree), thread_id=f"thread-{number:06}" if kind == "threads" else THREAD)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[-LAST:])


if __name__ == "__main__":
    where, folder, what, start_at, how_many, *own_database = sys.argv[1:]
    print(asyncio.run(fill(where, Path(folder), what, int(start_at), int(how_many), *own_database)))
