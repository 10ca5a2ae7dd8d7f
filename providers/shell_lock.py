"""The lock on a workspace in a sandbox: the stage folder, and in it the owner file, which names a process of a host.

    .snapcore-stage/    mode 0700, made by `mkdir`: for one only
        owner           JSON of an `Owner`; its mtime, by the sandbox's clock, is a heartbeat for other hosts
        run             the script that works here now: pid, start, boot, host name; two never do
        new/            what is staged
        trash/          empty: for a local restore that finishes this one
        meta/           other names of files whose mode or time is being set
        journal         the steps, once sealed, in the format of a local restore (`journal.part` before)
        removed         there once everything that goes had gone
        opened          modes of folders that were made writable for the time being

An owner is dead when its process is surely gone, when it let go, or after 10 minutes without a heartbeat.
"""

import asyncio
import contextlib
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import msgspec

from snapcore.errors import Code, SnapcoreError, SnapshotError, printable
from snapcore.hosts import current_holder, is_gone
from snapcore.sandboxes import Shell

from .perfile_lock import Owner
from .shell_prelude import ask, failure
from .shell_tools import STALL_SECONDS, broken, quoted
from .stage_lock import busy

__all__ = ["Found", "ShellLock", "find_stage"]

BEAT_SECONDS: Final = 60.0
DEAD_SECONDS: Final = 600
OWNER_SECONDS: Final = 5.0  # a live maker writes its owner file right after it made the stage
RUN_SECONDS: Final = 60.0  # how long a script that a lost connection left behind is waited for
POLL_SECONDS: Final = 0.25
MAX_OWNER_BYTES: Final = 64 << 10

_KERNEL: Final = "shell:"  # before the boot id: a local restore of the same folder cannot try this lock by `flock`
_held: Final[set[str]] = set()  # tokens of this process's own stages

_OPEN: Final = r"""
mkdir -p -- "$wanted" 2>/dev/null
cd -P -- "$wanted" 2>/dev/null || say fail "$(mkdir -p -- "$wanted" 2>&1)$nl$(cd -P -- "$wanted" 2>&1)"
real=$(env pwd -P; echo .)
real=${real%"$nl."}
[ "$real" != / ] || real=
root=$real
[ ! -e ./.snapcore-stage ] && [ ! -L ./.snapcore-stage ] || say there
time_of
was=$t
m=
if ! said=$(mkdir ./.snapcore-stage 2>&1); then
    [ ! -e ./.snapcore-stage ] && [ ! -L ./.snapcore-stage ] || say there
    [ "$uid" != 0 ] && [ -O . ] && [ ! -w . ] && m=$(stat -c %a .) || say fail "$said"
    chmod u+rwx .
    if ! said=$(mkdir ./.snapcore-stage 2>&1); then
        chmod "00$m" .
        say fail "$said"
    fi
fi
in_stage
fill() {
    [ -z "$m" ] || printf '%s \0' "$m" >./opened
    printf '%s' "$owner" | cat >./owner && mkdir ./new ./trash ./meta # cat says why it cannot, printf does not
}
if ! said=$(fill 2>&1); then
    dismantle "$was"
    [ -z "$m" ] || chmod "00$m" .
    say fail "$said"
fi
cd -P .. && set_time "$was"
printf 'open\n%s\0' "${root:-/}"
cat /proc/self/mountinfo 2>/dev/null
printf '\n%s\n' "$end"
exit 0
"""

_FIND: Final = r"""
cd -P -- "$wanted" 2>/dev/null || say none
[ -e ./.snapcore-stage ] || [ -L ./.snapcore-stage ] || say none
[ -d ./.snapcore-stage ] && [ ! -L ./.snapcore-stage ] || say nofolder
real=$(env pwd -P; echo .)
real=${real%"$nl."}
[ "$real" != / ] || real=
root=$real
cd -P ./.snapcore-stage 2>/dev/null || say closed
is_at "$root/.snapcore-stage" || say none
[ -O . ] || say foreign
o=
if [ -f ./owner ] && [ ! -L ./owner ]; then
    { IFS= read -r o <./owner; } 2>/dev/null
    m=$(stat -c %Y ./owner) || m=$(date +%s)
elif [ -e ./owner ] || [ -L ./owner ]; then
    say noowner
else
    m=$(stat -c %Y .) || m=$(date +%s)
fi
me
running=
! worked_in || running=running
sealed=
[ ! -f ./journal ] || sealed=sealed
printf 'there\n%s\0%s\0%s\0%s\0%s\n%s\n' "${root:-/}" "$(($(date +%s) - m))" "$running" "$sealed" "$o" "$end"
exit 0
"""

_TAKE: Final = r"""
in_stage
o=
[ ! -f ./owner ] || [ -L ./owner ] || { IFS= read -r o <./owner; } 2>/dev/null
[ "$o" = "$judged" ] || say lost
mark
sign() {
    printf '%s' "$owner" | cat >./owner.new && mv -f ./owner.new ./owner
}
if ! said=$(sign 2>&1); then
    [ -f ./journal ] || rm -rf ./new # the disk may be full of it
    said=$(sign 2>&1) || say fail "$said"
fi
x=
[ ! -f ./journal ] || [ -L ./journal ] || x=sealed
[ ! -f ./removed ] || x=$x-removed
say taken "$x"
"""

_BEAT: Final = r"""
in_stage
owned "$token" || say lost
touch -c ./owner
say beaten
"""

_RELEASE: Final = r"""
in_stage
owned "$token" || say lost
printf '%s' "$owner" >./owner.new && mv -f ./owner.new ./owner
say released
"""


class Found(msgspec.Struct, frozen=True):
    """A stage that is there: the root's resolved path, seconds since the last heartbeat, whether a script works in it,
    whether it is sealed, and the owner file as it is."""

    root: bytes
    age: int
    running: bool
    sealed: bool
    owner: bytes

    def holder(self) -> Owner | None:
        """The owner, None when the file does not say."""
        try:
            owner = msgspec.json.decode(self.owner, type=Owner)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return msgspec.structs.replace(owner, boot_id=owner.boot_id.removeprefix(_KERNEL))

    def alive(self) -> bool:
        """Whether the owner may live."""
        owner = self.holder()
        if owner is None:
            return self.age < OWNER_SECONDS
        if owner.released or is_gone(owner):
            return False
        here = current_holder()
        mine = (owner.host, owner.pid, owner.boot_id, owner.started) == (here.host, here.pid, here.boot_id, here.started)
        if mine and _KERNEL.encode() in self.owner:
            return owner.token in _held
        return self.age < DEAD_SECONDS


async def find_stage(shell: Shell, root: str) -> Found | None:
    """The stage in a root, None when there is none. `SnapshotError` `RESTORE_BLOCKED` for what nothing can be made of."""
    word, data = await ask(shell, _FIND, b"/", names={"wanted": quoted(_bytes(root))})
    if word == "none":
        return None
    if word != "there":
        raise _blocked(word)
    parts = data.split(b"\0", 4)
    if len(parts) != 5 or not parts[0].startswith(b"/") or len(parts[4]) > MAX_OWNER_BYTES:
        raise broken("it says of a stage what makes no sense")
    try:
        return Found(parts[0], int(parts[1]), bool(parts[2]), bool(parts[3]), parts[4])
    except ValueError:
        raise broken("it says of a stage what makes no sense") from None


class ShellLock:
    """A stage that this process holds. Its heartbeat goes on by itself until `drop`, or until it is dropped."""

    def __init__(self, shell: Shell, root: bytes, owner: Owner, mounts: bytes = b"") -> None:
        self.shell = shell
        self.root = root
        self.mounts = mounts
        self._owner = owner
        self._beating: asyncio.Task[None] | None = None
        self.sealed = False
        self.removed = False
        _held.add(owner.token)
        weakref.finalize(self, _held.discard, owner.token)

    @property
    def token(self) -> str:
        """What the owner file holds as long as the lock is held."""
        return self._owner.token

    @staticmethod
    async def create(shell: Shell, root: str) -> "ShellLock | None":
        """Make a stage, and the root when it is not there; None when there is one already."""
        owner = _me()
        names = {"wanted": quoted(_bytes(root)), "owner": quoted(msgspec.json.encode(owner))}
        word, data = await ask(shell, _OPEN, b"/", names=names)
        if word == "there":
            return None
        if word != "open":
            raise failure("A restore cannot be staged in the sandbox", data)
        real, nul, mounts = data.partition(b"\0")
        if not nul or not real.startswith(b"/"):
            raise broken("it does not say where the workspace is")
        lock = ShellLock(shell, real, owner, mounts)
        lock._beat_on()
        return lock

    @staticmethod
    async def take_over(shell: Shell, found: Found) -> "ShellLock | None":
        """Take the stage of a dead owner; None when another was faster."""
        lock = ShellLock(shell, found.root, _me())
        names = {"owner": quoted(msgspec.json.encode(lock._owner)), "judged": quoted(found.owner)}
        try:
            word, data = await ask(shell, _TAKE, found.root, names=names)
        except BaseException:
            lock.drop()
            raise
        if word == "taken":
            lock.sealed, lock.removed = data.startswith(b"sealed"), data == b"sealed-removed"
            lock._beat_on()
            return lock
        lock.drop()
        if word in ("lost", "busy"):
            return None
        raise failure("An interrupted restore cannot be cleaned up", data)

    async def ask(
        self,
        script: str,
        stdin: Callable[[], bytes | AsyncIterator[bytes]] = bytes,
        *,
        names: Mapping[str, str] = {},
        patience: float = STALL_SECONDS,
    ) -> tuple[str, bytes]:
        """`ask` in this stage, with its token and what `stdin` makes. A script that a lost connection left at work is waited
        for. `ProviderError` `WORKSPACE_BUSY` when that lasts, or when another took the stage."""
        deadline = time.monotonic() + RUN_SECONDS
        while True:
            word, data = await ask(
                self.shell, script, self.root, stdin(), names={"token": self.token, **names}, patience=patience
            )
            if word == "lost":
                raise busy(None)
            if word != "busy":
                return word, data
            if time.monotonic() > deadline:
                raise busy(self._owner)
            await asyncio.sleep(POLL_SECONDS)

    async def release(self) -> None:
        """Let go, the stage left for the next `recover`. Where that cannot be written down, the heartbeat's end tells it."""
        self._owner = msgspec.structs.replace(self._owner, released=True)
        names = {"token": self.token, "owner": quoted(msgspec.json.encode(self._owner))}
        self.drop()
        with contextlib.suppress(SnapcoreError):
            await ask(self.shell, _RELEASE, self.root, names=names)

    def drop(self) -> None:
        """End the heartbeat. Idempotent."""
        _held.discard(self.token)
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None

    def _beat_on(self) -> None:
        self._beating = asyncio.create_task(_beat(weakref.ref(self), self.shell, self.root, self.token))


async def _beat(lock: "weakref.ref[ShellLock]", shell: Shell, root: bytes, token: str) -> None:
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        if lock() is None:
            return
        with contextlib.suppress(SnapcoreError):  # the next one, or the restore itself, finds out what is wrong
            await ask(shell, _BEAT, root, names={"token": token})


def _me() -> Owner:
    me = current_holder()
    return Owner(me.host, me.pid, _KERNEL + me.boot_id, me.started, secrets.token_hex(16))


def _bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _blocked(word: str) -> SnapcoreError:
    why = {
        "nofolder": "it is no folder",
        "closed": "it cannot be entered",
        "foreign": "another user of the sandbox left it",
        "noowner": "its owner file is none",
    }.get(word)
    if why is None:
        return broken(f"it answered {printable(word[:40])!r}")
    return SnapshotError(
        f"The workspace holds a .snapcore-stage that cannot be used: {why}.",
        code=Code.RESTORE_BLOCKED,
        paths=[b".snapcore-stage"],
        hint="Run this as the user who restored, or remove it and restore again.",
    )
