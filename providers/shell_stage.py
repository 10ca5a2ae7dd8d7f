"""A restore in the making in a sandbox: the local stage's layout and rules, by scripts for `sh`.

What is written is gathered on this host and goes into the stage as tar streams of some MiB, each verified by its digest where
the sandbox can tell it, and by what it ends with. The journal goes with the last of them. A small restore takes three pipes: to
open the stage, to fill and seal it, to swap.
"""

import asyncio
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Final, Literal

from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.protocols import (
    Buffer,
    PlaceStep,
    StageFile,
    StageFolder,
    StageLink,
    StageWrite,
    Step,
    SwapReport,
)
from snapcore.sandboxes import Shell

from .folders import split
from .journal import Journal, check_step
from .links import inside
from .mounts import is_below_mount, unescaped
from .shell_lock import OWNER_SECONDS, POLL_SECONDS, RUN_SECONDS, ShellLock, find_stage
from .shell_prelude import MAX_RUNNING, failure
from .shell_spool import PIECE, Batch, Spool, Waiting
from .shell_swap import SwapPlan, run_swap
from .shell_tar import FOLDER, HARD_LINK, LINK, REGULAR, member
from .shell_tools import STALL_SECONDS, Tools, broken, quoted
from .stage_lock import busy, provider_error
from .threads import in_thread, uncancelled

__all__ = ["ShellStage", "open_stage", "recover"]

FLUSH_MEMORY: Final = 8 << 20
FLUSH_BYTES: Final = 256 << 20
DEEP: Final = 3000  # bytes of a path that a sandbox's tar is given at most; the system's limit is 4096
JOURNAL_PIECE: Final = 8 << 20
MAX_JOURNAL: Final = 4 << 30

_NEW: Final = b"new/"
_JOURNAL: Final = b"/journal"  # its name in the spool, which no staged file can have
_SPECIAL_BITS: Final = stat.S_ISUID | stat.S_ISGID

_FILL: Final = r"""
enter
rest=$base
while [ -n "$rest" ]; do
    c=${rest%%/*}
    case $rest in */*) rest=${rest#*/} ;; *) rest= ;; esac
    cd -P "./$c" 2>/dev/null || say fail 'a staged folder cannot be entered'
done
take() {
    umask 0 # busybox takes it off the modes that are asked for
    tar -x -p $owners -f -
    r=$?
    [ $r != 0 ] || cat >/dev/null
    return $r
}
command -v tar >/dev/null || say fail 'tar: not found'
r=0
if command -v sha256sum >/dev/null && command -v tee >/dev/null && mkfifo "$k/pipe$$" 2>/dev/null; then
    said=$(
        sha256sum <"$k/pipe$$" &
        { tee "$k/pipe$$" | take; } 2>&1 >/dev/null
        r=$?
        [ $r = 0 ] || kill $! 2>/dev/null
        wait
        exit $r
    ) || r=$?
    rm -f "$k/pipe$$"
    case $r$said in
    0*"$digest  -"*) ;;
    0*) r=1 said='what was sent arrived changed' ;;
    esac
else
    said=$(take 2>&1 >/dev/null) || r=$?
fi
if [ $r = 0 ] && [ ! -f "./.arrived-$token" ]; then
    r=1 said='what was sent did not arrive whole'
fi
rm -f "./.arrived-$token"
if [ $r = 0 ] && [ -n "$seal" ]; then
    if [ "$seal" = all ]; then
        sync -f . 2>/dev/null || sync 2>/dev/null
    else
        synced ./journal.part
    fi
    said=$(mv -f ./journal.part ./journal 2>&1) || r=$?
    synced .
fi
if [ $r != 0 ]; then
    [ -f "$k/journal" ] || rm -rf "$k/new" 2>/dev/null # nothing comes of it, and the disk may be full
    say fail "$said"
fi
say filled
"""

_UNSEAL: Final = '[ ! -f "$k/journal" ] || { mv -f "$k/journal" "$k/journal.part" && synced "$k/."; }'

_JOURNAL_PIECE: Final = r"""
enter
printf 'journal\n'
tail -c "+$from" ./journal | head -c "$count"
rm -f "$k/run"
printf '\n%s\n' "$end"
exit 0
"""


async def open_stage(shell: Shell, root: str, tools: Tools) -> "ShellStage":
    """Create the stage in `root`, which is created when it is not there, after recovering what a dead owner left."""
    tools.require("tar", "stat")
    for _ in range(100):
        lock = await ShellLock.create(shell, root)
        if lock is not None:
            return ShellStage(lock, tools)
        await recover(shell, root, tools)
    raise busy(None)


async def recover(shell: Shell, root: str, tools: Tools) -> Literal["", "swept", "finished"]:
    """Finish the sealed swap of a dead owner, or sweep its unsealed stage. `ProviderError` `WORKSPACE_BUSY` when it lives, or
    when a script that a lost connection left behind goes on for long."""
    done: Literal["", "swept", "finished"] = ""
    began = time.monotonic()
    while True:
        found = await find_stage(shell, root)
        if found is None:
            return done
        owner, waited = found.holder(), time.monotonic() - began
        if (owner is not None and found.alive()) or waited > RUN_SECONDS:
            raise busy(owner)
        done = "finished" if found.sealed else "swept"
        if not found.running and (owner is not None or not found.alive() or waited > OWNER_SECONDS):
            lock = await ShellLock.take_over(shell, found)
            if lock is not None:
                return await uncancelled(_clean_up(lock, tools))
        await asyncio.sleep(POLL_SECONDS)


async def _clean_up(lock: ShellLock, tools: Tools) -> Literal["swept", "finished"]:
    try:
        if not lock.sealed:
            await run_swap(lock, None)
            return "swept"
        with tempfile.TemporaryFile() as file:
            await _fetch_journal(lock, file.fileno())
            journal = await in_thread(Journal, file.fileno())
            await run_swap(lock, SwapPlan(journal, seconds=tools.touch != "ns", removed=lock.removed))
        return "finished"
    except BaseException:
        await lock.release()
        raise
    finally:
        lock.drop()


async def _fetch_journal(lock: ShellLock, fd: int) -> None:
    size = 0
    while size < MAX_JOURNAL:
        word, data = await lock.ask(_JOURNAL_PIECE, names={"from": str(size + 1), "count": str(JOURNAL_PIECE)})
        if word != "journal" or len(data) > JOURNAL_PIECE:
            raise failure("The journal of an interrupted restore cannot be read", data[:1000])
        await in_thread(os.pwrite, fd, data, size)
        size += len(data)
        if len(data) < JOURNAL_PIECE:
            return
    raise broken("its journal does not end")


class ShellStage:
    """See `Stage`. Dropped without `swap` or `abort`, it lets go of the lock, and the next `recover` cleans up."""

    def __init__(self, lock: ShellLock, tools: Tools) -> None:
        self._lock = lock
        self._tools = tools
        self._mutex = asyncio.Lock()
        self._state: Literal["open", "sealed", "swapping", "done"] = "open"
        self._spoiled = False  # some of what was to be staged did not arrive
        points = (line.split(b" ", 5) for line in lock.mounts.splitlines())
        mounts = (inside(unescaped(fields[4]), lock.root) for fields in points if len(fields) > 4)
        self._mounts = frozenset(path for path in mounts if path)
        self._spool = Spool()
        self._waiting = Waiting()
        self._folders: set[bytes] = set()  # staged folders
        self._bare: list[bytes] = []  # staged without their extended attributes
        self._undone: list[tuple[bytes, str]] = []
        self._journal = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _close)
        self._settled: frozenset[bytes] = frozenset()

    def __del__(self) -> None:
        self._close()

    def drop(self) -> None:
        """Let go of the lock and leave the stage as it is, as the end of the process would."""
        self._close()

    async def write(self, writes: Sequence[StageWrite]) -> None:
        """See `Stage.write`. What is too little for a pipe of its own waits on this host, at the latest until `seal`."""
        async with self._mutex:
            self._expect("open")
            pending = iter(writes)
            try:
                while await in_thread(self._gather, pending):
                    await self._flush()
            except OSError as error:
                raise provider_error(error, "The restore cannot be gathered on this host") from error

    async def log(self, steps: Sequence[Step]) -> None:
        """See `Stage.log`. Steps are kept on this host until `seal`. A placement at or below a mount point is refused here:
        `ProviderError` `NOT_CAPABLE`."""
        async with self._mutex:
            self._expect("open")
            for step in steps:
                check_step(step)
                if isinstance(step, PlaceStep):
                    self._check_mount(step.path)
                    self._report_bare(step)
            await in_thread(self._journal.write, Journal.encode(steps))

    async def seal(self, *, durable: bool) -> None:
        """See `Stage.seal`. There are no holds to wait for."""
        await uncancelled(self._seal(durable))

    async def swap(self) -> SwapReport:
        """See `Stage.swap`. A cancelled caller waits for it to finish."""
        return await uncancelled(self._swap())

    async def abort(self) -> None:
        """See `Stage.abort`. After a swap that was cut short it only lets go: `recover` then finishes it."""
        await uncancelled(self._abort())

    # ---- gathering, in a worker thread

    def _gather(self, pending: Iterator[StageWrite]) -> bool:
        """Take writes until there is enough for a pipe of its own, which is told, or until the last."""
        for write in pending:
            self._gather_one(write)
            if self._waiting.memory >= FLUSH_MEMORY or self._waiting.size >= FLUSH_BYTES:
                return True
        return False

    def _gather_one(self, write: StageWrite) -> None:
        staged = write.staged
        if isinstance(write, StageFile):
            if not (write.last and len(write.data) == write.size):
                self._spool.put(staged, write.offset, write.data, write.size)
                if not write.last:
                    return
                self._add_file(write, self._spool.take(staged, write.size))
            else:
                self._add_file(write, write.data)
        elif isinstance(write, StageFolder):
            self._folders.add(staged)
            self._add(FOLDER, staged, mode=0o700)
        elif isinstance(write, StageLink):
            self._add(LINK, staged, mode=0o777, mtime_ns=write.mtime_ns, target=write.target, owner=write.owner)
        else:
            base, name = _place(write.first)
            if base != _place(staged)[0]:
                raise ProviderError("A hard link leads to a path that is too long for a sandbox's tar.", code=Code.NOT_CAPABLE)
            self._add(HARD_LINK, staged, target=name)

    def _add_file(self, file: StageFile, content: Buffer | tuple[int, int]) -> None:
        if file.xattrs and file.owner is not None:
            self._bare.append(file.staged)
        mode = file.mode if file.owner is not None else file.mode & ~_SPECIAL_BITS  # they would give the user's rights
        self._add(REGULAR, file.staged, content, mode=mode, mtime_ns=file.mtime_ns, owner=file.owner)

    def _add(
        self,
        kind: bytes,
        staged: bytes,
        content: Buffer | tuple[int, int] = b"",
        *,
        mode: int = 0o600,
        mtime_ns: int = 0,
        target: bytes = b"",
        owner: tuple[int, int] | None = None,
    ) -> None:
        mine = (max(self._tools.uid, 0), max(self._tools.gid, 0))
        if owner is not None and owner != mine and self._tools.uid != 0:
            raise ProviderError(
                "The sandbox's user may not give files to others.",
                code=Code.NOT_CAPABLE,
                hint="Restore as root there, or without owners. The workspace is as it was.",
            )
        base, name = _place(staged)
        self._waiting.owners |= owner is not None
        size = content[1] if isinstance(content, tuple) else len(content)
        header = member(kind, name, mode=mode, size=size, mtime_ns=mtime_ns, target=target, owner=owner or mine)
        self._waiting.add(base, header, content)

    # ---- on the way

    async def _flush(self, seal: str = "") -> None:
        """Send what was gathered. `seal`: the journal is with it, and becomes valid once `all` that is staged, or it alone
        (`journal`), is on the disk."""
        self._spoiled = True
        batches = self._waiting.batches
        for number, batch in enumerate(batches):
            batch.add(member(REGULAR, b".arrived-" + self._lock.token.encode()))
            await self._send(batch, seal if number == len(batches) - 1 else "")
        self._waiting = Waiting()
        self._spool.reset()
        self._spoiled = False

    async def _send(self, batch: Batch, seal: str) -> None:
        owners = "-o"
        if self._waiting.owners:
            owners = "--same-owner" if self._tools.tar == "gnu" else ""
        names = {
            "base": quoted(batch.base),
            "owners": quoted(owners.encode()),
            "digest": await in_thread(self._digest, batch),
            "seal": seal,
        }
        patience = MAX_RUNNING if seal else STALL_SECONDS
        word, data = await self._lock.ask(_FILL, lambda: self._stream(batch), names=names, patience=patience)
        if word != "filled":
            raise failure("The restore cannot be staged", data)

    def _digest(self, batch: Batch) -> str:
        digest = hashlib.sha256()
        for piece in batch.pieces(self._spool):
            digest.update(piece)
        return digest.hexdigest()

    async def _stream(self, batch: Batch) -> AsyncIterator[bytes]:
        pieces = batch.pieces(self._spool)
        while piece := await in_thread(next, pieces, b""):
            yield piece

    async def _seal(self, durable: bool) -> None:
        async with self._mutex:
            self._expect("open")
            try:
                await in_thread(self._gather_end)
            except OSError as error:
                raise provider_error(error, "The restore cannot be gathered on this host") from error
            await self._flush("all" if durable else "journal")
            self._state = "sealed"

    def _gather_end(self) -> None:
        """Put metadata of new folders, which a tar sets many of at once, and the journal after all else."""
        self._journal.flush()
        journal = Journal(self._journal.fileno())
        placed = {step.path: step.staged for step in journal.placements() if step.staged in self._folders}
        disturbed = {split(step.path)[0] for step in journal.placements()}
        settled: set[bytes] = set()
        if self._tools.tar != "gnu" and self._tools.uid != 0:
            placed = {}  # busybox sets the mode of a folder that is there for the superuser only
        at: dict[bytes, bytes | None] = {}
        for step in journal.metadata():
            staged = _staged_at(step.path, placed, at)
            ready = step.mode is not None and step.mtime_ns is not None and step.path not in disturbed
            if staged is not None and ready and staged in self._folders:
                self._add(FOLDER, staged, mode=step.mode or 0, mtime_ns=step.mtime_ns or 0, owner=step.owner)
                settled.add(step.path)
        self._settled = frozenset(settled)
        size = os.fstat(self._journal.fileno()).st_size
        for offset in range(0, size, PIECE):
            self._spool.put(_JOURNAL, offset, os.pread(self._journal.fileno(), PIECE, offset), size)
        header = member(REGULAR, b"journal.part", size=size)
        self._waiting.add(b"", header, self._spool.take(_JOURNAL, size))

    async def _swap(self) -> SwapReport:
        async with self._mutex:
            self._expect("sealed")
            self._state = "swapping"
            try:
                journal = await in_thread(Journal, self._journal.fileno())
                plan = SwapPlan(journal, seconds=self._tools.touch != "ns", settled=self._settled)
                undone = await run_swap(self._lock, plan)
                self._state = "done"
            finally:
                self._close()
            return SwapReport((*self._undone, *undone))

    async def _abort(self) -> None:
        async with self._mutex:
            state, self._state = self._state, "done"
            self._close()
            if state in ("open", "sealed"):
                await run_swap(self._lock, None, _UNSEAL)
            elif state == "swapping":
                await self._lock.release()

    # ---- checks

    def _check_mount(self, path: bytes) -> None:
        if path in self._mounts or is_below_mount(split(path)[0], self._mounts):
            raise ProviderError(
                "The restore reaches into something that is mounted in the workspace.",
                code=Code.NOT_CAPABLE,
                hint="Restore that mount point as a root of its own. The workspace is as it was.",
            )

    def _report_bare(self, step: PlaceStep) -> None:
        for staged in self._bare:
            if staged == step.staged or staged.startswith(step.staged + b"/"):
                self._undone.append((step.path + staged[len(step.staged) :], "no extended attributes are set in sandboxes"))

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise SnapshotError(f"This restore is {self._state}, not {state}.", code=Code.INVALID_REQUEST)
        if self._spoiled:
            raise SnapshotError("Some of this restore did not arrive; abort it.", code=Code.INVALID_REQUEST)

    def _close(self) -> None:
        self._journal.close()
        self._spool.close()
        self._lock.drop()


def _place(staged: bytes) -> tuple[bytes, bytes]:
    """The folder of the stage in which a tar extracts what is to be `staged`, and its name for that tar."""
    path = _NEW + staged
    if len(path) <= DEEP:
        return b"", path
    cut = path.rfind(b"/", 0, (len(path) - DEEP // 3) // (DEEP * 2 // 3) * (DEEP * 2 // 3))
    return path[:cut], path[cut + 1 :]


def _staged_at(path: bytes, placed: Mapping[bytes, bytes], known: dict[bytes, bytes | None]) -> bytes | None:
    """Where what will be at `path` is staged, if that is inside a new folder and not one itself. `known` remembers answers for
    parents."""
    parent = split(path)[0]
    passed = []
    here = parent
    while here and here not in known and here not in placed:
        passed.append(here)
        here = split(here)[0]
    top = (here if here in placed else known.get(here)) if here else None
    for folder in passed:
        known[folder] = top
    return placed[top] + path[len(top) :] if top else None
