"""A restore in the making through a user's own handle: the layout and the rules of the local stage, without its flock.

The lock is the stage folder, made with `mkdir`; the owner file in it names the process and holds a token. An owner is
dead when its process is surely gone, when it let go, or after 10 minutes without a heartbeat (the owner file's mtime,
against that of a file just written). A handle has no fsync: the journal is as durable as its writes are.
"""

import asyncio
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import IO, Any, Final, Literal

import msgspec

from snapcore.errors import Code, SnapshotError
from snapcore.hosts import current_holder, is_gone
from snapcore.model import Holder, path_key, validate_path
from snapcore.protocols import (
    PlaceStep,
    SetMetaStep,
    StageFile,
    StageFolder,
    StageHardLink,
    StageLink,
    StageWrite,
    Step,
    SwapReport,
)

from .folders import STAGE_NAME, split
from .handle_files import HandleFiles
from .journal import Journal
from .stage_lock import busy, provider_error
from .threads import in_thread, uncancelled

__all__ = ["PerFileStage", "open_stage", "recover"]

BEAT_SECONDS: Final = 60.0
DEAD_NS: Final = 600 * 1_000_000_000
OWNER_SECONDS: Final = 5.0  # a live maker writes its owner file right after it made the stage
SIDE_BY_SIDE: Final = 16

_OWNER: Final = STAGE_NAME + b"/owner"
_JOURNAL: Final = STAGE_NAME + b"/journal"
_NEW: Final = STAGE_NAME + b"/new/"
_TRASH: Final = STAGE_NAME + b"/trash/"


class Owner(Holder, frozen=True):
    """Whose stage it is. `released` when its owner let go of a sealed one."""

    token: str = ""
    released: bool = False


class Undone(Exception):  # noqa: N818 (not an error: the step is reported and the swap goes on)
    """Why a step was not done."""


async def open_stage(files: HandleFiles) -> "PerFileStage":
    """Create the stage, and the root when it is not there, after recovering what a dead owner left."""
    await files.mkdir_parents()
    await recover(files)
    if await files.lstat_or_none(STAGE_NAME) is not None:
        raise busy(await _read_owner(files))
    try:
        await files.mkdir(STAGE_NAME)
    except FileExistsError:
        raise busy(None) from None
    lock = await _Lock.take(files)
    await files.mkdir(_NEW[:-1])
    await files.mkdir(_TRASH[:-1])
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
    await _check_dead(files)
    lock = await _Lock.take(files)
    if await files.lstat_or_none(_JOURNAL) is None:
        await lock.dismantle()
        return "swept"
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
        await _Swap(files, lock, journal, again=True).run()
    await lock.dismantle()
    return "finished"


async def _sealing(files: HandleFiles) -> bool:
    """Whether the journal was being copied to its final name, for lack of `rename`: so nothing was swapped yet."""
    return await files.lstat_or_none(_JOURNAL + b".part") is not None


async def _check_dead(files: HandleFiles) -> None:
    """Raise unless the owner of the stage there is surely dead."""
    owner = await _read_owner(files)
    waited = time.monotonic()
    while owner is None:
        if time.monotonic() - waited >= OWNER_SECONDS:
            return
        await asyncio.sleep(0.25)
        owner = await _read_owner(files)
    if owner.released or is_gone(owner):
        return
    try:
        beaten = (await files.lstat(_OWNER)).st_mtime_ns
        probe = STAGE_NAME + b"/probe-" + secrets.token_hex(8).encode()
        await files.write(probe, b"")
        now = (await files.lstat(probe)).st_mtime_ns
        await files.remove(probe)
    except FileNotFoundError:
        raise busy(owner) from None  # it is being dismantled right now
    if now - beaten < DEAD_NS:
        raise busy(owner)


async def _read_owner(files: HandleFiles) -> Owner | None:
    try:
        return msgspec.json.decode(await files.read_whole(_OWNER), type=Owner)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


class _Lock:
    """The stage as this process holds it."""

    def __init__(self, files: HandleFiles, owner: Owner) -> None:
        self._files = files
        self._owner = owner
        self._beaten = time.monotonic()

    @staticmethod
    async def take(files: HandleFiles) -> "_Lock":
        """Write this process into the owner file; the last who wrote has it."""
        me = current_holder()
        lock = _Lock(files, Owner(me.host, me.pid, me.boot_id, me.started, secrets.token_hex(16)))
        await lock._write()
        await lock.check()
        return lock

    async def check(self) -> None:
        """Raise when another took the stage over."""
        owner = await _read_owner(self._files)
        if owner is None or owner.token != self._owner.token:
            raise busy(owner)

    async def beat(self) -> None:
        if time.monotonic() - self._beaten > BEAT_SECONDS:
            await self._write()

    async def release(self) -> None:
        """Let go, the stage left for the next `recover`."""
        self._owner = msgspec.structs.replace(self._owner, released=True)
        await self._write()

    async def dismantle(self) -> None:
        """Remove the stage, the journal first and the owner last."""
        files = self._files
        for name in (b"journal", b"journal.part", b"new", b"trash", b"modes"):
            await files.remove_tree(STAGE_NAME + b"/" + name)
        for name in await files.list(STAGE_NAME):
            if name != b"owner":
                await files.remove_tree(STAGE_NAME + b"/" + name)
        await files.remove(_OWNER)
        await files.remove(STAGE_NAME)

    async def _write(self) -> None:
        await self._files.write(_OWNER, msgspec.json.encode(self._owner))
        self._beaten = time.monotonic()


class PerFileStage:
    """See `Stage`. What the handle cannot make is left out and reported by `swap` as undone."""

    def __init__(self, files: HandleFiles, lock: _Lock) -> None:
        self._files = files
        self._lock = lock
        self._state: Literal["open", "sealed", "done"] = "open"
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
                validate_path(step.path)
                if isinstance(step, PlaceStep):
                    validate_path(step.staged)
                    if not self._can_place(step):
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
        """See `Stage.abort`. After `seal` it only lets go: the swap is then finished by `recover`."""
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
        await asyncio.gather(*(self._write_file(file, bytes(file.data)) for file in run))

    async def _write_file(self, file: StageFile, data: bytes) -> None:
        path = _NEW + file.staged
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
        files, path = self._files, _NEW + write.staged
        if isinstance(write, StageFolder):
            await files.mkdir(path)
        elif isinstance(write, StageLink):
            if files.can_symlink:
                await files.symlink(write.target, path)
            else:
                self._impossible[write.staged] = "this sandbox handle cannot make links"
        elif isinstance(write, StageHardLink):
            first = _NEW + write.first
            if files.can_link:
                await files.link(first, path)
            else:
                await _copy(files, first, path)

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
            self._journal.flush()
            try:
                journal = await in_thread(Journal, self._journal.fileno())
                undone = await _Swap(self._files, self._lock, journal, again=False).run()
                self._state = "done"
                await self._lock.dismantle()
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
                if state == "open":
                    await self._lock.dismantle()
                elif state == "sealed":
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


class _Swap:
    """One run of a sealed journal; `again` when an earlier run may have done some of it."""

    def __init__(self, files: HandleFiles, lock: _Lock, journal: Journal, *, again: bool) -> None:
        self._files = files
        self._lock = lock
        self._journal = journal
        self._again = again
        self._undone: list[tuple[bytes, str]] = []
        self._folders = {b""}  # known to be real folders, not links
        self._modes: dict[bytes, int] = {}  # of folders that were made writable

    async def run(self) -> list[tuple[bytes, str]]:
        for number, path in self._journal.removals():
            await self._step(path, self._remove, number, path)
        for path in self._journal.folder_removals():
            await self._step(path, self._remove_folder, path)
        for place in self._journal.placements():
            await self._step(place.path, self._place, place)
        for meta in self._journal.metadata():
            await self._step(meta.path, self._set_meta, meta)
        for path in sorted(self._modes, key=path_key, reverse=True):
            await self._step(path, self._files.set_meta, path, self._modes[path], None)
        return self._undone

    async def _step(self, path: bytes, work: Callable[..., Awaitable[None]], *args: object) -> None:
        await self._lock.beat()
        try:
            await work(*args)
        except Undone as reason:
            self._undone.append((path, str(reason)))
        except OSError as error:
            self._undone.append((path, error.strerror or str(error)))

    async def _parent(self, path: bytes) -> bytes:
        """The parent's path, every component of it checked to be a folder and no link."""
        parent = split(path)[0]
        if parent in self._folders:
            return parent
        end = -1
        while end != len(parent):
            end = parent.find(b"/", end + 1)
            end = len(parent) if end == -1 else end
            here = parent[:end]
            if here not in self._folders:
                st = await self._files.lstat(here)
                if not stat.S_ISDIR(st.st_mode):
                    raise Undone("a parent is a link or no folder now")
                self._folders.add(here)
        return parent

    async def _changing(self, path: bytes, change: Callable[..., Awaitable[None]], *args: object) -> None:
        """Do it; when that is refused, once more with the parent folder made writable."""
        try:
            await change(*args)
        except PermissionError:
            parent = split(path)[0]
            if not self._files.can_chmod or parent in self._modes:
                raise
            mode = (await self._files.lstat(parent)).st_mode & 0o7777
            self._modes[parent] = mode
            await self._files.set_meta(parent, mode | 0o700, None)
            await change(*args)

    async def _remove(self, number: int, path: bytes) -> None:
        trashed = _TRASH + b"%d" % number
        if self._again and await self._files.lstat_or_none(trashed) is not None:
            return  # what is at the path now came later
        try:
            await self._parent(path)
        except FileNotFoundError:
            return
        st = await self._files.lstat_or_none(path)
        if st is None:
            return
        if stat.S_ISDIR(st.st_mode):
            raise Undone("it is a folder now")
        if self._files.can_rename:
            await self._changing(path, self._files.rename, path, trashed)
        else:
            await self._changing(path, self._files.remove, path)
            await self._files.write(trashed, b"")  # says so to a later run, when something was placed there

    async def _remove_folder(self, path: bytes) -> None:
        try:
            await self._parent(path)
        except (FileNotFoundError, Undone):
            return
        st = await self._files.lstat_or_none(path)
        if st is None or not stat.S_ISDIR(st.st_mode):
            return  # gone, or something was placed there already
        if await self._files.list(path):
            raise Undone("the folder is not empty")  # looked up, since a handle's remove may take what is in it
        self._folders.discard(path)
        await self._changing(path, self._files.remove, path)

    async def _place(self, step: PlaceStep) -> None:
        files, staged = self._files, _NEW + step.staged
        st = await files.lstat_or_none(staged)
        if st is None:
            return
        try:
            await self._parent(step.path)
        except FileNotFoundError:
            raise Undone("its parent folder is not there") from None
        there = await files.lstat_or_none(step.path)
        is_folder = stat.S_ISDIR(st.st_mode)
        if there is not None and stat.S_ISDIR(there.st_mode) and not (is_folder and self._copied_before()):
            raise Undone("a folder is there now")
        if there is not None and is_folder and not stat.S_ISDIR(there.st_mode):
            raise Undone("something else is there now")
        if files.can_rename:
            await self._changing(step.path, files.rename, staged, step.path)
        else:
            await self._changing(step.path, self._copy_tree, staged, step.path)

    def _copied_before(self) -> bool:
        """Whether an earlier run may have begun to copy a folder into place."""
        return self._again and not self._files.can_rename

    async def _copy_tree(self, staged: bytes, path: bytes) -> None:
        """Copy into place, then remove what was staged: as long as it is there, the copy is not known to be whole."""
        pending = [b""]
        while pending:
            below = pending.pop()
            source, target = staged + below, path + below
            st = await self._files.lstat(source)
            if stat.S_ISDIR(st.st_mode):
                if await self._files.lstat_or_none(target) is None:
                    await self._files.mkdir(target)
                pending += [below + b"/" + name for name in await self._files.list(source)]
            elif stat.S_ISLNK(st.st_mode):
                if await self._files.lstat_or_none(target) is not None:
                    await self._files.remove(target)
                await self._files.symlink(await self._files.readlink(source), target)
            else:
                there = await self._files.lstat_or_none(target)
                if there is not None:
                    await self._files.remove(target)  # never written through: it may be a link, or have other names
                await _copy(self._files, source, target)
        await self._files.remove_tree(staged)

    async def _set_meta(self, step: SetMetaStep) -> None:
        if step.path:
            await self._parent(step.path)
        st = await self._files.lstat(step.path)
        if not (stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode)):
            raise Undone("it is no file or folder now")
        await self._files.set_meta(step.path, step.mode, step.mtime_ns)
        if step.mode is not None:
            self._modes.pop(step.path, None)


async def _copy(files: HandleFiles, source: bytes, target: bytes) -> None:
    """Copy a file with mode and mtime."""
    st: Any = await files.lstat(source)
    mode = st.st_mode & 0o7777
    if not mode & 0o400:
        await files.set_meta(source, mode | 0o400, None)
    await files.write(target, await files.read_whole(source))
    await files.set_meta(target, mode, st.st_mtime_ns)
