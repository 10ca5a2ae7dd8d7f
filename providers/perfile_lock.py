"""The lock on a workspace that is reached through a user's own handle: the stage folder and the owner file in it.

The folder is made with `mkdir`; the owner file names the process and holds a token. An owner is dead when its process is
surely gone, when it let go, or after 10 minutes without a heartbeat (the owner file's mtime, against that of a file just
written).
"""

import asyncio
import secrets
import stat
import time
from typing import Final

import msgspec

from snapcore.hosts import current_holder, is_gone
from snapcore.model import Holder

from .folders import STAGE_NAME
from .handle_files import HandleFiles
from .journal import damaged
from .stage_lock import busy

__all__ = ["Owner", "PerFileLock", "check_dead", "read_owner"]

BEAT_SECONDS: Final = 60.0
DEAD_NS: Final = 600 * 1_000_000_000
OWNER_SECONDS: Final = 5.0  # a live maker writes its owner file right after it made the stage
MAX_OWNER_BYTES: Final = 64 << 10

_OWNER: Final = STAGE_NAME + b"/owner"


class Owner(Holder, frozen=True):
    """Whose stage it is. `released` when its owner let go of a sealed one."""

    token: str = ""
    released: bool = False


async def check_dead(files: HandleFiles) -> None:
    """Raise unless the owner of the stage there is surely dead."""
    owner = await read_owner(files)
    waited = time.monotonic()
    while owner is None:
        if time.monotonic() - waited >= OWNER_SECONDS:
            return
        await asyncio.sleep(0.25)
        owner = await read_owner(files)
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


async def read_owner(files: HandleFiles) -> Owner | None:
    """Who holds the stage, None when that cannot be told."""
    await _check_owner_file(files)
    try:
        return msgspec.json.decode(await files.read_whole(_OWNER), type=Owner)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


async def _check_owner_file(files: HandleFiles) -> None:
    """Refuse what a planted stage may hold in its place, before it is read or written through."""
    st = await files.lstat_or_none(_OWNER)
    if st is not None and (not stat.S_ISREG(st.st_mode) or st.st_size > MAX_OWNER_BYTES):
        raise damaged("its owner file is none")


class PerFileLock:
    """The stage as this process holds it."""

    def __init__(self, files: HandleFiles, owner: Owner) -> None:
        self._files = files
        self._owner = owner
        self._beaten = time.monotonic()

    @staticmethod
    async def take(files: HandleFiles) -> "PerFileLock":
        """Write this process into the owner file; the last who wrote has it."""
        me = current_holder()
        lock = PerFileLock(files, Owner(me.host, me.pid, me.boot_id, me.started, secrets.token_hex(16)))
        await lock._write()
        await lock.check()
        return lock

    async def check(self) -> None:
        """Raise when another took the stage over."""
        owner = await read_owner(self._files)
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
        await _check_owner_file(self._files)
        await self._files.write(_OWNER, msgspec.json.encode(self._owner))
        self._beaten = time.monotonic()
