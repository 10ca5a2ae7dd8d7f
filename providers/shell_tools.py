"""What the tools of a sandbox can do, found out by one script; and how names and scripts are put together for its `sh`."""

import asyncio
import posixpath
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

import msgspec

from snapcore.errors import Code, ProviderError, printable
from snapcore.sandboxes import ExecResult, Pipe, Shell

__all__ = [
    "ENVIRONMENT",
    "PROBE",
    "STALL_SECONDS",
    "Tools",
    "broken",
    "find_tools",
    "finished",
    "quoted",
    "read_tools",
    "run",
    "starting",
    "unstalled",
    "word",
]

STALL_SECONDS: Final = 300.0  # a pipe that is silent for longer is taken for dead
MAX_ANSWER: Final = 1 << 20
MAX_WORD: Final = 20
MAX_REASON: Final = 300
NO_NULL: Final = 97  # the exit code of `PROBE` where scripts would wait, or leave a file, for want of /dev/null

ENVIRONMENT: Final = "LC_ALL=C TZ=UTC0 QUOTING_STYLE=literal; export LC_ALL TZ QUOTING_STYLE\n"
"""How every script begins: what the tools print depends on no setting of the sandbox."""

PROBE: Final = (
    ENVIRONMENT
    + """
[ -c /dev/null ] || exit 97
"""
    + r"""is() { printf '%s=%s\n' "$1" "$2"; }
is uid "$(id -u 2>/dev/null)"
is gid "$(id -g 2>/dev/null)"
find=
case $(find / -ignore_readdir_race -prune ! \( -readable -executable -false \) -printf %Px%C@ 2>/dev/null) in
x[-0-9]*) find=printf ;;
*) if find / -prune -print0 >/dev/null 2>&1; then find=print0; fi ;;
esac
is find "$find"
case $(printf 'a\0b' | xargs -0 sh -c 'echo "$@"' sh 2>/dev/null) in 'a b') xargs=1 ;; *) xargs= ;; esac
is xargs "$xargs"
case $(stat -c %.9Y / 2>/dev/null) in
*.?????????) stat=ns ;;
*[0-9]*)
    stat=seconds
    for i in /proc/self/ / . /tmp; do # some show nine zeros for every time, and some of these may have them
        case $(stat -c %y "$i" 2>/dev/null) in *.*[1-9]*' '*) stat=text ;; esac
    done ;;
*) stat= ;;
esac
is stat "$stat"
case $(tar --version 2>/dev/null) in
*GNU*) tar=gnu ;;
*[Bb]usy[Bb]ox*) tar=busybox ;;
?*) tar=other ;;
*) tar= ;;
esac
is tar "$tar"
if tar -c -f - -C / dev/null >/dev/null 2>&1; then archives=1; else archives=; fi
is archives "$archives"
case $(printf ab | head -c 1 2>/dev/null) in a) head=1 ;; *) head= ;; esac
is head "$head"
if touch -c -d @1.5 /.no/such 2>/dev/null; then touch=ns
elif touch -c -d @2 /.no/such 2>/dev/null; then touch=seconds
else touch=; fi
is touch "$touch"
case $(date +%s%N 2>/dev/null) in
'' | *[!0-9]*) date=seconds ;;
??????????????*) date=ns ;;
*) date=seconds ;;
esac
case $date$stat$(stat -c %Y /proc/self/ 2>/dev/null) in secondstext*[0-9]) date=proc ;; esac
is date "$date"
"""
)
"""Prints `name=word` lines, and leaves the words in shell variables of these names. To be followed by a line of another kind."""


class Tools(msgspec.Struct, frozen=True):
    """What can be done in a sandbox. Words that are empty: the tool is missing, or cannot do what is needed.

    `find`: `printf`, or `print0` alone. `stat`: `ns` (`%.9Y`), `text` (nanoseconds in `%y` only) or `seconds`. `tar`: `gnu`,
    `busybox` or `other`. `touch`: `ns` or `seconds`, of `-d @...`. `date`: `ns`, `proc` (the time of a new process's folder tells
    it) or `seconds`. `uid` and `gid` are -1 when they are not known.
    """

    uid: int = -1
    gid: int = -1
    find: str = ""
    xargs: bool = False
    stat: str = ""
    tar: str = ""
    archives: bool = False
    head: bool = False
    date: str = ""
    touch: str = ""

    @property
    def nanoseconds(self) -> bool:
        """Whether a scan shows times in nanoseconds."""
        return self.find == "printf" or self.stat in ("ns", "text")

    def require(self, *names: str) -> None:
        """`ProviderError` `MISSING_TOOL` unless each of these fields says that there is something."""
        missing = [_NEEDED[name] for name in names if not getattr(self, name)]
        if missing:
            raise ProviderError(
                f"The sandbox lacks {' and '.join(missing)}.",
                code=Code.MISSING_TOOL,
                hint="Install it in the sandbox's image: GNU coreutils, findutils and tar, or busybox.",
            )


_NEEDED: Final = {
    "find": "`find` with -print0",
    "xargs": "`xargs` with -0",
    "stat": "`stat` with -c",
    "tar": "`tar`",
    "archives": "`tar` with -c",
    "head": "`head` with -c",
}


def quoted(name: bytes) -> str:
    """A name as one word of a script, whatever bytes it holds. `ValueError` for a NUL, which no name can hold."""
    if b"\0" in name:
        raise ValueError("a name cannot hold a NUL")
    return "'" + name.decode("utf-8", "surrogateescape").replace("'", "'\\''") + "'"


def word(text: str) -> str:
    """The same for a text, which may stand for bytes that are not UTF-8 as `os.fsdecode` does it."""
    return quoted(text.encode("utf-8", "surrogateescape"))


def starting(cwd: str | None, root: str) -> str:
    """The line by which a script goes where its command is to start: `cwd` if one is given, otherwise `root` if it is there."""
    place = word(posixpath.join(root, cwd or ""))
    return f"cd -- {place} || exit 126" if cwd else f"[ -x {place} ] && cd -- {place}"


async def find_tools(shell: Shell, root: str) -> Tools:
    """Ask the sandbox, by one pipe. `root` is not looked at."""
    end = secrets.token_hex(16)
    answer = await run(shell, f"{PROBE}\nis end {end}\n", max_output=1 << 16)
    lines = answer.splitlines()
    if not lines or lines[-1] != f"end={end}".encode():
        raise broken("its answer was cut short")
    return read_tools(lines[:-1])


def read_tools(lines: Sequence[bytes]) -> Tools:
    """What `PROBE` printed; empty words and unknown names are passed over."""
    said: dict[str, str] = {}
    for line in lines:
        name, _, word = line.partition(b"=")
        if len(word) <= MAX_WORD and word.isalnum():
            said[name.decode("ascii", "replace")] = word.decode("ascii")
    try:
        return msgspec.convert(said, Tools, strict=False)
    except msgspec.ValidationError:
        raise broken("it says of its tools what makes no sense") from None


async def run(shell: Shell, script: str, stdin: bytes | AsyncIterator[bytes] = b"", *, max_output: int = MAX_ANSWER) -> bytes:
    """All that a script prints. `ProviderError` when that is more than `max_output` bytes, when the script does not end with 0,
    or falls silent."""
    out = bytearray()
    async with shell.pipe(script, stdin) as pipe:
        async for piece in unstalled(pipe.stdout()):
            out += piece
            if len(out) > max_output:
                raise broken("it answers with more than there can be")
        await finished(pipe)
    return bytes(out)


async def unstalled(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The pieces; `ProviderError` `SANDBOX_UNAVAILABLE` when none comes for `STALL_SECONDS`."""
    stream = aiter(pieces)
    while True:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise broken(f"it has been silent for {STALL_SECONDS:.0f} seconds") from None
        yield piece


async def finished(pipe: Pipe) -> ExecResult:
    """How a script ended whose output has ended. `ProviderError` unless it ended with 0: `NOT_CAPABLE` when there is no `sh`."""
    try:
        async with asyncio.timeout(STALL_SECONDS):
            result = await pipe.wait()
    except TimeoutError:
        raise broken("its command does not end") from None
    if result.exit_code == NO_NULL:
        raise ProviderError(
            "The sandbox lacks `/dev/null`.", code=Code.MISSING_TOOL, hint="Mount a /dev in it, or make the device."
        )
    if result.exit_code in (126, 127):
        raise ProviderError(f"The sandbox has no `sh` that could be run: {_last_line(result)}.", code=Code.NOT_CAPABLE)
    if result.exit_code or result.truncated:
        raise broken(f"a command ended with {result.exit_code}: {_last_line(result)}")
    return result


def broken(why: str) -> ProviderError:
    """The error for a sandbox that is out of reach, or does not answer as a working one does."""
    return ProviderError(
        f"The sandbox did not answer as it should: {why}.",
        code=Code.SANDBOX_UNAVAILABLE,
        hint="Try again; if it stays, look at the sandbox itself.",
        retryable=True,
    )


def _last_line(result: ExecResult) -> str:
    lines = result.stderr.strip().splitlines()
    return printable(lines[-1][-MAX_REASON:]) if lines else "it said nothing"
