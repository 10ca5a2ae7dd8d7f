"""`make demo`: a workspace is captured, changed, destroyed, restored and forked, before your eyes.

Everything happens in one folder (`.demo`, or the one named as argument), works offline, and ends with 1 when anything that
was restored is not exactly what was there.
"""

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import snapcore
from snapcore.model import Checkpoint
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree

from .output import count, moment, print_line, print_table, size

__all__ = ["main"]

FILES: Final = 2_000
BIG_BYTES: Final = 24 << 20
STEPS: Final = 3
THREAD: Final = "build-the-website"
TRY: Final = "try-another-way"


class Show:
    """Tells the story: with colours and rules on a terminal, in plain lines elsewhere."""

    def __init__(self) -> None:
        self._number = 0
        self._console = None
        if sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=False)

    def step(self, title: str) -> None:
        """Begin a step."""
        self._number += 1
        if self._console is not None:
            self._console.print()
            self._console.rule(f"[bold cyan]{self._number}[/]  [bold]{title}[/]", align="left", style="cyan")
        else:
            print_line()
            print_line(f"{self._number}. {title}")

    def line(self, text: str) -> None:
        """Say something."""
        if self._console is not None:
            self._console.print(f"   {text}", markup=False, soft_wrap=True)  # a command that is broken could not be copied
        else:
            print_line(f"   {text}")

    def good(self, text: str) -> None:
        """Say that something was checked and holds."""
        if self._console is not None:
            from rich.text import Text

            self._console.print(Text.assemble(("   ✓ ", "bold green"), text))
        else:
            print_line(f"   ok: {text}")

    def table(self, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        """Show rows under a head; the last two columns are numbers."""
        if self._console is None:
            print_table(head, rows, right=(len(head) - 2, len(head) - 1))
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for number, name in enumerate(head):
            table.add_column(name, justify="right" if number >= len(head) - 2 else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)


class NotEqualError(Exception):
    """What was restored is not what was there."""


def main() -> None:
    """Run the demo in the folder named in `sys.argv`, else in `.demo`."""
    base = Path(sys.argv[1] if len(sys.argv) > 1 else ".demo").resolve()
    try:
        asyncio.run(_demo(Show(), base))
    except NotEqualError as error:
        sys.exit(f"FAILED: {error}")


async def _demo(show: Show, base: Path) -> None:
    _remove(base)
    work, repository = base / "workspace", base / "repository"
    started = time.monotonic()

    show.step("An agent has been at work")
    work.mkdir(parents=True)
    make_tree(work, files=FILES, seed=7, big_bytes=BIG_BYTES)
    files, total = _measure(work)
    show.line(f"{count(files, 'file')}, {size(total)}: sources, a database, links, odd names, a large binary")

    async with snapcore.open_repository(str(repository)) as repo:
        show.step("Capture it")
        with _timed() as elapsed:
            first = await repo.capture_with_report(str(work), thread_id=THREAD, label="first draft")
        show.line(
            f"{count(first.checkpoint.totals.files, 'file')} ({size(first.checkpoint.totals.bytes)}) "
            f"in {elapsed():.2f} s, stored as {size(first.bytes_stored)}"
        )
        show.line("left out by default: .git, node_modules, .env files and their like")
        _copy(work, base / "first")

        show.step("The agent goes on, and each step is captured")
        for number in range(1, STEPS + 1):
            mutate_tree(work, seed=number)
            with _timed() as elapsed:
                report = await repo.capture_with_report(str(work), thread_id=THREAD, step=number)
            show.line(
                f"step {number}: read {count(report.files_read, 'changed file')}, "
                f"stored {size(report.bytes_stored)}, in {elapsed() * 1000:.0f} ms"
            )
        before = _copy(work, base / "last")

        show.step("Disaster: rm -rf workspace")
        _remove(work)
        show.line("the sandbox is gone")

        show.step("Restore the newest checkpoint")
        await _restored(show, before, work, lambda: _restore(show, repo, work, THREAD))

        show.step("Go back to the first draft, in another folder")
        draft = base / "draft"
        await _restored(show, base / "first", draft, lambda: _restore(show, repo, draft, THREAD, first.checkpoint.id))

        show.step("Fork: another line of work from the first draft, without copying a file")
        with _timed() as elapsed:
            await repo.fork(THREAD, first.checkpoint.id, to_thread_id=TRY)
        show.line(f"thread {TRY} made in {elapsed() * 1000:.0f} ms")
        mutate_tree(draft, seed=99)
        report = await repo.capture_with_report(str(draft), thread_id=TRY, label="bolder")
        show.line(f"its first own step read {count(report.files_read, 'file')} and stored {size(report.bytes_stored)}")

        show.step("What the repository holds")
        rows: list[tuple[str, ...]] = []
        for thread in (THREAD, TRY):
            rows += [_row(checkpoint) for checkpoint in await repo.list(thread)]
        show.table(("thread", "checkpoint", "created", "reason", "label", "files", "size"), rows)
        stats = await repo.stats()
        show.line("")
        held = count(stats.checkpoints, "checkpoint")
        show.line(f"{held} of {size(stats.logical_bytes)} in all, stored as {size(stats.stored_bytes)}")
        verified = await repo.verify(read_data=True)
        if not verified.ok:
            raise NotEqualError(f"the repository has problems: {verified.problems}")
        show.good(f"every byte of it read back and checked: {count(verified.records, 'record')}")

    for folder in ("first", "last"):
        _remove(base / folder)
    show.line("")
    show.line(f"done in {time.monotonic() - started:.1f} s. Look around:")
    near = os.path.relpath(repository)
    repo_name = os.fspath(repository) if near.startswith("..") else near
    show.line("  . .venv/bin/activate")
    show.line(f"  export SNAPCORE_REPO={shlex.quote(repo_name)}")
    show.line(f"  snapcore list --thread {THREAD}")
    show.line(f"  snapcore diff 'label:first draft' latest --thread {THREAD}")


async def _restore(show: Show, repo: snapcore.Repository, into: Path, thread: str, checkpoint: str | None = None) -> None:
    with _timed() as elapsed:
        receipt = await repo.restore(str(into), thread_id=thread, checkpoint_id=checkpoint)
    if receipt is None:
        raise NotEqualError(f"the thread {thread} has no checkpoint")
    show.line(f"{count(receipt.files, 'file')}, {size(receipt.bytes_written)} written, in {elapsed():.2f} s")


async def _restored(show: Show, expected: Path, found: Path, restore: Callable[[], Awaitable[None]]) -> None:
    await restore()
    differences = compare_trees(expected, found)
    if differences:
        raise NotEqualError("\n".join([f"{found.name} is not what was captured:", *differences[:20]]))
    show.good("the same as a copy made before: bytes, modes, times, links, hard links")


def _row(checkpoint: Checkpoint) -> tuple[str, ...]:
    return (
        checkpoint.thread_id,
        checkpoint.id[:8],
        moment(checkpoint.created_at)[11:19],
        checkpoint.reason,
        checkpoint.label or "",
        f"{checkpoint.totals.files:,}",
        size(checkpoint.totals.bytes),
    )


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    started = time.perf_counter()
    yield lambda: time.perf_counter() - started


def _measure(root: Path) -> tuple[int, int]:
    sizes = [path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return len(sizes), sum(sizes)


def _copy(root: Path, to: Path) -> Path:
    # tar keeps what is compared: hard links, modes, nanoseconds
    to.mkdir()
    archive = to.with_suffix(".tar")
    for command in (
        ["tar", "-C", os.fspath(root), "--format=posix", "-cf", os.fspath(archive), "."],
        ["tar", "-C", os.fspath(to), "-xpf", os.fspath(archive)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotEqualError(f"the workspace could not be copied: {done.stderr}")
    archive.unlink()
    return to


def _remove(root: Path) -> None:
    if not root.exists():
        return
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o700)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
