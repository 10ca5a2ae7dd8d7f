"""Commands in a sandbox behind a command of this host, run by its `sh` with binary pipes.

What is run comes by stdin, in front of the command's own input: never as an argument, which other users of either host could
see and which may be no longer than 128 KiB. A line of the shell's says that it has begun, so that what came before (a login
script's words), and a far end that could not be reached, are told from the command's own output and exit code. Another one on
stderr says that the command has ended: without it, an exit code is that of a connection that was lost.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Final

from snapcore.errors import Code, ProviderError, printable

from .shell_tools import starting, word

__all__ = ["Beginning", "Ending", "broken", "command_text", "loader", "new_mark", "stop_script", "unreachable"]

MAX_NOISE: Final = 64 << 10
MAX_REASON: Final = 300
MARK_VARIABLE: Final = "SNAPCORE_EXEC"

_GONE: Final = re.compile(rb"(?i)no such (container|pod|sandbox)|\(NotFound\)|is not running|(container|pod) not found")
_LOST: Final = re.compile(
    rb"(?m)^(client_loop: |Connection to .* closed by remote host|Connection (reset|closed) by |Timeout, server |"
    rb"packet_write|ssh_dispatch|Write failed|Read from remote host)"
)


def new_mark() -> str:
    """A word that no output holds by chance."""
    return f"snapcore-{secrets.token_hex(16)}"


def loader(mark: str) -> str:
    """A script that reads commands up to the line `mark` from its stdin, says so, and runs them with the rest of the stdin. When
    they have ended, it says so on stderr, and nothing else: not what some shells say of what a signal has ended.

    `read` takes byte by byte from a pipe, as POSIX demands, so nothing of that rest is lost."""
    return f"""s=
while IFS= read -r l; do
case $l in {mark}) echo {mark}+; exec 3>&2 2>/dev/null; (exec 2>&3 3>&-; eval "$s"); s=$?; printf {mark}= >&3; exit $s;; esac
s="$s$l
"
done
echo {mark}-; exit 125"""


def command_text(mark: str, words: Sequence[str], *, cwd: str | None, root: str, environment: Mapping[str, str] | None) -> bytes:
    """The input of `loader`: go to where it is to start (see `starting`), set the environment, become the command."""
    lines = [f"export {MARK_VARIABLE}={mark}", starting(cwd, root)]
    lines += [f"export {name}={word(value)}" for name, value in (environment or {}).items()]
    lines.append("exec " + " ".join(map(word, words)))
    return "\n".join([*lines, mark, ""]).encode("utf-8", "surrogateescape")


def stop_script(mark: str) -> str:
    """Kill what a command left: each process that has the mark in its environment. Nothing where there is no /proc."""
    return f"""for p in /proc/[0-9]*; do
if grep -qs {MARK_VARIABLE}={mark} "$p/environ"; then kill -9 "${{p#/proc/}}"; fi
done 2>/dev/null"""


class Beginning:
    """Holds output back until the shell says that it has begun, and drops what came before."""

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode()
        self._seen = b""
        self.begun = False
        self.unfed = False  # the shell got no input
        self.noisy = False

    def passed(self, piece: bytes) -> bytes:
        """What of a piece is the command's own."""
        if self.begun or self.noisy:
            return piece if self.begun else b""
        self._seen += piece
        before, found, rest = self._seen.partition(self._mark)
        if not found or len(rest) < 2:
            self.noisy = len(before) > MAX_NOISE
            return b""
        self._seen = b""
        self.begun = rest.startswith(b"+\n")
        self.unfed = not self.begun
        return rest[2:] if self.begun else b""


class Ending:
    """Takes out of stderr what `loader` says in the end."""

    def __init__(self, mark: str) -> None:
        self._mark = f"{mark}=".encode()
        self._held = b""  # what may be the first part of it
        self.told = False

    def passed(self, piece: bytes) -> bytes:
        """What of a piece is the command's own."""
        if self.told:
            return piece
        seen = self._held + piece
        before, found, rest = seen.partition(self._mark)
        self.told = bool(found)
        most = 0 if found else min(len(seen), len(self._mark) - 1)
        held = next((length for length in range(most, 0, -1) if seen.endswith(self._mark[:length])), 0)
        self._held = before[len(before) - held :]
        return before[: len(before) - held] + rest


def broken(name: str, stderr: bytes) -> ProviderError:
    """The error of a command that began, and of which nobody knows how it ended."""
    return ProviderError(
        f"The connection to the sandbox behind {name} broke while a command ran: {_last_line(stderr)}.",
        code=Code.SANDBOX_UNAVAILABLE,
        retryable=True,
    )


def unreachable(name: str, code: int, stderr: bytes, beginning: Beginning) -> ProviderError | None:
    """The error of a command that did not begin, or whose connection was lost; None when `code` is its own."""
    if beginning.begun and not (code == 255 and _LOST.search(stderr)):
        return None
    said = _last_line(stderr)
    if beginning.unfed:
        return ProviderError(
            f"The shell behind {name} gets no input.",
            code=Code.NOT_CAPABLE,
            hint="kubectl exec, docker exec and their like need the option -i.",
        )
    if beginning.noisy:
        return ProviderError(f"What answers behind {name} is no shell.", code=Code.NOT_CAPABLE)
    if code in (126, 127):
        return ProviderError(f"There is no `sh` that could be run behind {name}: {said}.", code=Code.NOT_CAPABLE)
    if _GONE.search(stderr):
        return ProviderError(f"The sandbox behind {name} is gone, or does not run: {said}.", code=Code.NO_SANDBOX)
    return ProviderError(f"The sandbox behind {name} cannot be reached: {said}.", code=Code.SANDBOX_UNAVAILABLE, retryable=True)


def _last_line(stderr: bytes) -> str:
    lines = stderr.strip().splitlines()
    return printable(lines[-1][-MAX_REASON:]).rstrip(".") if lines else "it said nothing"
