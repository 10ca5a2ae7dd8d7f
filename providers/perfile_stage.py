"""A restore in the making through a user's own handle: the layout and the rules of the local stage.

A handle has no fsync: the journal is as durable as its writes are.
"""

import asyncio
import contextlib
import os
import stat
import tempfile
from collections.abc import Sequence
from typing import IO, Final, Literal

from snapcore.errors import Code, SnapshotError
from snapcore.protocols import (
    PlaceStep,
    StageFile,
    StageFolder,
    StageHardLink,
    StageLink,
    StageWrite,
    Step,
    SwapReport,
)

from .folders import STAGE_NAME
from .handle_files import HandleFiles
from .journal import Journal, check_step, damaged
from .perfile_lock import PerFileLock, check_dead, read_owner
from .perfile_swap import NEW, TRASH, PerFileSwap, copy_file
from .stage_lock import busy, provider_error
from .threads import in_thread, together, uncancelled

__all__ = ["PerFileStage", "open_stage", "recover"]

SIDE_BY_SIDE: Final = 16

_JOURNAL: Final = STAGE_NAME + b"/journal"


async def open_stage(files: HandleFiles) -> "PerFileStage":
    """Create the stage, and the root when it is not there, after recovering what a dead owner left."""
    await files.mkdir_parents()
    await recover(files)
    if await files.lstat_or_none(STAGE_NAME) is not None:
        raise busy(await read_owner(files))
    try:
        await files.mkdir(STAGE_NAME)
    except FileExistsError:
        raise busy(None) from None
    try:
        lock = await PerFileLock.take(files)
        await files.mkdir(NEW[:-1])
        await files.mkdir(TRASH[:-1])
    except OSError:
        with contextlib.suppress(OSError):
            await files.remove_tree(STAGE_NAME)
        raise
    return PerFileStage(files, lock)


async def recover(files: HandleFiles) -> Literal["", "swept", "finished"]:
    """Finish the sealed swap of a dead owner, or sweep its unsealed stage."""
    st = await files.lstat_or_none(STAGE_NAME)
    if st is None:
        return ""
    if not stat.S_ISDIR(st.st_mode):
        raise SnapshotError(
            "The workspace holds a .snapcore-stage that is no folder.",
            code=Code.RESTORE_BLOCKED,
            paths=[STAGE_NAME],
            hint="Remove it, then restore again.",
        )
    await check_dead(files)
    lock = await PerFileLock.take(files)
    sealed = await files.lstat_or_none(_JOURNAL)
    if sealed is None:
        await lock.dismantle()
        return "swept"
    if not stat.S_ISREG(sealed.st_mode):
        raise damaged("its journal is no regular file")
    with tempfile.TemporaryFile() as spool:
        async for piece in files.read(_JOURNAL):
            await in_thread(spool.write, piece)
        spool.flush()
        try:
            journal = await in_thread(Journal, spool.fileno())
        except SnapshotError:
            if not await _sealing(files):
                raise
            await lock.dismantle()
            return "swept"
        await PerFileSwap(files, lock, journal, again=True).run()
    await lock.dismantle()
    return "finished"


async def _sealing(files: HandleFiles) -> bool:
    """Whether the journal was being copied to its final name, for lack of `rename`: so nothing was swapped yet."""
    return await files.lstat_or_none(_JOURNAL + b".part") is not None


class PerFileStage:
    """See `Stage`. What the handle cannot make is left out and reported by `swap` as undone."""

    def __init__(self, files: HandleFiles, lock: PerFileLock) -> None:
        self._files = files
        self._lock = lock
        self._state: Literal["open", "sealed", "swapping", "done"] = "open"
        self._mutex = asyncio.Lock()
        self._spools: dict[bytes, IO[bytes]] = {}  # files that come in pieces, gathered on this host
        self._impossible: dict[bytes, str] = {}  # staged names that were not made
        self._undone: list[tuple[bytes, str]] = []
        self._journal = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _close)

    def __del__(self) -> None:
        self._close()

    async def write(self, writes: Sequence[StageWrite]) -> None:
        """See `Stage.write`. Whole files are written up to 16 side by side."""
        async with self._mutex:
            self._expect("open")
            await self._lock.beat()
            try:
                await self._write(writes)
            except OSError as error:
                raise provider_error(error, "The restore cannot be staged") from error

    async def log(self, steps: Sequence[Step]) -> None:
        """See `Stage.log`. Steps are kept on this host until `seal`."""
        async with self._mutex:
            self._expect("open")
            kept: list[Step] = []
            for step in steps:
                check_step(step)
                if isinstance(step, PlaceStep) and not self._can_place(step):
                    continue
                kept.append(step)
            await in_thread(self._journal.write, Journal.encode(kept))

    async def seal(self, *, durable: bool) -> None:
        """See `Stage.seal`. Durability is the handle's."""
        await uncancelled(self._seal())

    async def swap(self) -> SwapReport:
        """See `Stage.swap`. A cancelled caller waits for it to finish."""
        return await uncancelled(self._swap())

    async def abort(self) -> None:
        """See `Stage.abort`. After a swap that was cut short it only lets go: `recover` then finishes it."""
        await uncancelled(self._abort())

    async def _write(self, writes: Sequence[StageWrite]) -> None:
        run: list[StageFile] = []
        for write in writes:
            if isinstance(write, StageFile) and write.last and len(write.data) == write.size:
                run.append(write)
                if len(run) < SIDE_BY_SIDE:
                    continue
            await self._write_whole(run)
            run = []
            if isinstance(write, StageFile):
                if not (write.last and len(write.data) == write.size):
                    await self._write_piece(write)
            else:
                await self._create(write)
        await self._write_whole(run)

    async def _write_whole(self, run: Sequence[StageFile]) -> None:
        await together(self._write_file(file, bytes(file.data)) for file in run)

    async def _write_file(self, file: StageFile, data: bytes) -> None:
        path = NEW + file.staged
        await self._files.write(path, data)
        mode = file.mode if file.owner is not None else file.mode & ~(stat.S_ISUID | stat.S_ISGID)
        await self._files.set_meta(path, mode, file.mtime_ns)

    async def _write_piece(self, file: StageFile) -> None:
        if file.staged not in self._spools:
            self._spools[file.staged] = tempfile.TemporaryFile()  # noqa: SIM115 (closed when complete)
        spool = self._spools[file.staged]
        await in_thread(os.pwrite, spool.fileno(), file.data, file.offset)
        if file.last:
            with self._spools.pop(file.staged):
                spool.truncate(file.size)
                spool.seek(0)
                await self._write_file(file, await in_thread(spool.read))

    async def _create(self, write: StageWrite) -> None:
        files, path = self._files, NEW + write.staged
        if isinstance(write, StageFolder):
            await files.mkdir(path)
        elif isinstance(write, StageLink):
            if files.can_symlink:
                await files.symlink(write.target, path)
            else:
                self._impossible[write.staged] = "this sandbox handle cannot make links"
        elif isinstance(write, StageHardLink):
            first = NEW + write.first
            if files.can_link:
                await files.link(first, path)
            else:
                await copy_file(files, first, path)

    def _can_place(self, step: PlaceStep) -> bool:
        """Report what cannot be placed: this step, or something in the folder that it places."""
        inside = step.staged + b"/"
        for staged, reason in self._impossible.items():
            if staged == step.staged or staged.startswith(inside):
                self._undone.append((step.path + staged[len(step.staged) :], reason))
        return step.staged not in self._impossible

    async def _seal(self) -> None:
        async with self._mutex:
            self._expect("open")
            await self._lock.check()
            self._journal.seek(0)
            data = await in_thread(self._journal.read)
            part = _JOURNAL + b".part"
            try:
                await self._files.write(part, data)
                if self._files.can_rename:
                    await self._files.rename(part, _JOURNAL)
                else:
                    await self._files.write(_JOURNAL, data)
                    await self._files.remove(part)
            except OSError as error:
                raise provider_error(error, "The journal of the restore cannot be written") from error
            self._state = "sealed"

    async def _swap(self) -> SwapReport:
        async with self._mutex:
            self._expect("sealed")
            await self._lock.check()
            self._state = "swapping"
            self._journal.flush()
            try:
                journal = await in_thread(Journal, self._journal.fileno())
                undone = await PerFileSwap(self._files, self._lock, journal, again=False).run()
                await self._lock.dismantle()
                self._state = "done"
            except OSError as error:
                raise provider_error(error, "The restore was cut short; the next one finishes it") from error
            finally:
                self._close()
            return SwapReport((*self._undone, *undone))

    async def _abort(self) -> None:
        async with self._mutex:
            state, self._state = self._state, "done"
            self._close()
            try:
                if state == "sealed":
                    await self._lock.check()
                if state in ("open", "sealed"):
                    await self._lock.dismantle()  # the journal goes first: nobody finishes it
                elif state == "swapping":
                    await self._lock.release()
            except OSError as error:
                raise provider_error(error, "The stage cannot be removed; the next restore sweeps it") from error

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise SnapshotError(f"This restore is {self._state}, not {state}.", code=Code.INVALID_REQUEST)

    def _close(self) -> None:
        self._journal.close()
        while self._spools:
            self._spools.popitem()[1].close()
