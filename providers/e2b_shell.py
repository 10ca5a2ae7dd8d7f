"""`sh` in an E2B sandbox, with bytes in and out: the client's own streams carry text, so both go through files in the sandbox.

A pipe is a folder: its input comes in parts, each of which may be sent again; a script runs once, however often a broken
connection makes the command be sent; its output is one file, fetched by one download that goes on where it broke off. The
folder is removed when the pipe is left; what a crash leaves, the next handle removes after a while.
"""

import asyncio
import contextlib
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final

from snapcore.errors import Code, ProviderError, SnapcoreError
from snapcore.sandboxes import ExecResult

from .e2b_errors import closed, e2b_module, lost, of_the_client, retried, translated
from .threads import uncancelled

__all__ = ["END_OF_TREE", "E2BConnection", "E2BPipe", "E2BShell"]

PART: Final = 8 << 20  # bytes of input that are held and sent at once
PIECE: Final = 256 << 10  # large bodies in one piece are copied by each layer of the client
MAX_COMMAND: Final = 64 << 10  # Linux takes 128 KiB in one argument, and the script is in one
MAX_SAID: Final = 64 << 10
MAX_HEARD: Final = 16 << 20
STDERR_KEPT: Final = 8 << 10
DOWNLOADS: Final = 5  # attempts in a row that bring nothing new
REQUEST_SECONDS: Final = 120.0
WRITE_SECONDS: Final = 300.0
RUN_SECONDS: Final = 3600.0

PREPARE: Final = r"""
umask 077
d=/tmp/.snapcore-pipes-$(id -u)
mkdir "$d" 2>/dev/null
if [ ! -d "$d" ] || [ -L "$d" ] || [ ! -O "$d" ] || ! chmod 700 "$d"; then exit 97; fi
for f in "$d"/*; do
    [ -d "$f" ] || continue
    [ -z "$(find "$f" -mmin -30 2>&1 | head -n 1)" ] || continue
    p=$(cat "$f/run/pid" 2>/dev/null)
    if [ -n "$p" ] && kill -0 "$p" 2>/dev/null; then continue; fi
    rm -rf "$f"
done
echo; echo "snapcore $d"
"""
"""Makes the folder of all pipes, its user's own, and removes pipes that have not changed for half an hour and do not run."""

RUN: Final = r"""
umask 077
mkdir -p "$d" && cd "$d" || exit 97
if mkdir run 2>/dev/null; then
    echo $$ >run/pid
    for s in $sizes; do
        n=$((n + 1)); [ "$(($(wc -c <in.$n)))" = "$s" ] || exit 96
    done
    i=0
    while [ $i -lt "${n:-0}" ]; do
        i=$((i + 1)); cat in.$i || break; rm -f in.$i
    done | (
        SNAPCORE_PIPE=$d; export SNAPCORE_PIPE
        umask 022
        cd / || exit 97
        if [ -n "$script" ]; then exec sh -c "$script"; else exec sh "$d/script"; fi
    ) >out 2>err
    echo $? >run/new && mv run/new run/code
fi
n=0
while [ ! -e run/code ]; do
    p=$(cat run/pid 2>/dev/null)
    if [ -n "$p" ]; then
        if ! kill -0 "$p" 2>/dev/null && [ ! -e run/code ]; then exit 98; fi
    else
        n=$((n + 1)); [ $n -lt 100 ] || exit 98
    fi
    sleep 0.1 2>/dev/null || sleep 1
done
tail -c 8192 err >&2
echo; echo "snapcore $(cat run/code) $(($(wc -c <out)))"
"""
"""Runs the script once, with the folder's path in SNAPCORE_PIPE: whoever comes again waits for the end of the first run. `d`,
`sizes` and `script` are set before it. It ends with 96 when input is missing, 97 when there is no place, 98 when the first run
has died."""

END_OF_TREE: Final = r"""
case $p in '' | 0 | 1 | *[!0-9]*) exit 0 ;; esac
all=
add() { case " $all " in *" $1 "*) ;; *) kill -STOP "$1" 2>/dev/null && all="$all $1" && more=1 ;; esac; }
add "$p"
while [ -n "$more" ]; do
    more=
    for f in /proc/[0-9]*/stat; do
        read -r line <"$f" || continue
        set -- ${line##*) }
        case " $all " in *" $2 "*) f=${f#/proc/}; add "${f%/stat}" ;; esac
    done 2>/dev/null
done
[ -z "$all" ] || kill -KILL $all 2>/dev/null
"""
"""Ends the process `p` and all that descend from it: they are stopped first, so that none has a child that is not seen."""


class E2BConnection:
    """The client's object for one sandbox, and what must never be shown of it."""

    def __init__(self, sandbox: Any, user: str | None, hidden: tuple[str, ...]) -> None:
        self.sandbox = sandbox
        self.user = user
        self.hidden = hidden
        self.closed = False

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return str(self.sandbox.sandbox_id)

    def live(self) -> Any:
        """The client's object; `ProviderError` when the handle was closed."""
        if self.closed:
            raise closed()
        return self.sandbox

    async def run(self, command: str, *, seconds: float = REQUEST_SECONDS, user: str | None = None) -> ExecResult:
        """Run a short command of ours to its end. At most 64 KiB of its output are kept. Raises the client's errors."""
        said = {"stdout": "", "stderr": ""}
        heard = 0

        def hear(stream: str, text: str) -> None:
            nonlocal heard
            heard += len(text)
            if heard > MAX_HEARD:
                raise lost("it says more than there can be to say", retryable=False)
            said[stream] = (said[stream] + text)[-MAX_SAID:]

        handle = await self.live().commands.run(
            command,
            background=True,
            user=user or self.user,
            timeout=seconds,
            request_timeout=REQUEST_SECONDS,
            retain_output=False,
            on_stdout=lambda text: hear("stdout", text),
            on_stderr=lambda text: hear("stderr", text),
        )
        try:
            code = (await handle.wait()).exit_code
        except e2b_module().CommandExitException as error:
            code = error.exit_code
        finally:
            await handle.disconnect()
        return ExecResult(code, said["stdout"].encode(), said["stderr"].encode()[-STDERR_KEPT:])

    async def end_tree(self, pid: str, user: str | None = None) -> None:
        """End a process and what it started; `pid` is a word of `sh`. That it cannot be done is no error: it may have ended."""
        with contextlib.suppress(SnapcoreError):
            await retried(lambda: self.run(f"more=; p={pid}{END_OF_TREE}", user=user), self.id, self.hidden, attempts=2)


class E2BShell:
    """See `Shell`."""

    def __init__(self, connection: E2BConnection) -> None:
        self._connection = connection
        self._folder = ""
        self._preparing = asyncio.Lock()

    @property
    def sandbox_id(self) -> str:
        """`e2b://` with the sandbox's id."""
        return f"e2b://{self._connection.id}"

    def pipe(self, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> AbstractAsyncContextManager["E2BPipe"]:
        """See `Shell.pipe`. All input is sent and the script has ended when the `async with` is entered."""
        return E2BPipe(self, self._connection, script, stdin)

    async def folder(self) -> str:
        """Where pipes of this user are; made, and swept, once."""
        async with self._preparing:
            if not self._folder:
                connection = self._connection
                result = await retried(lambda: connection.run(PREPARE), connection.id, connection.hidden)
                found = re.search(rb"^snapcore (/tmp/\.snapcore-pipes-\d{1,10})$", result.stdout, re.MULTILINE)
                if found is None:
                    raise ProviderError(
                        "There is no place for temporary files in the E2B sandbox.",
                        code=Code.NOT_CAPABLE,
                        hint="They go into a folder below its /tmp, which must be writable.",
                    )
                self._folder = found[1].decode()
            return self._folder


class E2BPipe:
    """One script that runs once."""

    def __init__(self, shell: E2BShell, connection: E2BConnection, script: str, stdin: bytes | AsyncIterator[bytes]) -> None:
        self._shell = shell
        self._connection = connection
        self._script = script
        self._stdin = stdin
        self._folder = ""
        self._size = 0
        self._result = ExecResult(0)
        self._ended = False

    async def __aenter__(self) -> "E2BPipe":
        self._folder = f"{await self._shell.folder()}/{secrets.token_hex(16)}"
        try:
            await self._run(await self._send())
        except BaseException:
            await uncancelled(self._leave())
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await uncancelled(self._leave())

    async def stdout(self) -> AsyncIterator[bytes]:
        """See `Pipe.stdout`. A download that breaks off is begun again, and what has come already passed over."""
        seen, failures = 0, 0
        while seen < self._size:
            before = seen
            try:
                passed = 0
                async with await self._read() as source:
                    async for piece in source:
                        passed += len(piece)
                        if passed > self._size:
                            raise lost("its output is longer than it said", retryable=False)
                        if passed > seen:
                            fresh = piece[-(passed - seen) :]
                            seen = passed
                            yield fresh
                if seen == self._size:
                    return
                trouble = lost("its output was cut short")
            except Exception as error:
                if not of_the_client(error):
                    raise
                trouble = self._said(error)
            failures = failures + 1 if seen == before else 0
            if not trouble.retryable or failures == DOWNLOADS:
                raise trouble from None
            await asyncio.sleep(0.1 * (failures + 1))

    async def wait(self) -> ExecResult:
        """See `Pipe.wait`."""
        return self._result

    async def _read(self) -> Any:
        sandbox = self._connection.live()
        return await sandbox.files.read(f"{self._folder}/out", format="stream", user=self._connection.user)

    # ---- sending

    async def _send(self) -> list[int]:
        """Send the script if need be, and the input in parts; their sizes."""
        script = self._script.encode("utf-8", "surrogateescape")
        if len(script) > MAX_COMMAND or _is_odd(self._script):
            await self._write("script", [script])
            self._script = ""
        sizes: list[int] = []
        async for part in _parts(self._stdin):
            sizes.append(sum(map(len, part)))
            await self._write(f"in.{len(sizes)}", part)
        return sizes

    async def _write(self, name: str, data: Sequence[bytes]) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for piece in data:
                for start in range(0, len(piece), PIECE):
                    yield piece[start : start + PIECE]

        async def write() -> None:
            files = self._connection.live().files
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await files.write(f"{self._folder}/{name}", pieces(), user=self._connection.user)
            except TimeoutError:
                raise lost("it does not take what it is sent") from None

        await retried(write, self._connection.id, self._connection.hidden)

    # ---- running

    async def _run(self, sizes: list[int]) -> None:
        given = f"d={self._folder} sizes={shlex.quote(' '.join(map(str, sizes)))} script={shlex.quote(self._script)} n=0\n"
        try:
            async with asyncio.timeout(RUN_SECONDS):
                result = await retried(
                    lambda: self._connection.run(given + RUN, seconds=RUN_SECONDS), self._connection.id, self._connection.hidden
                )
        except TimeoutError:
            raise lost(f"a command did not end within {RUN_SECONDS:.0f} seconds", retryable=False) from None
        found = re.search(rb"^snapcore (\d{1,3}) (\d{1,18})$", result.stdout, re.MULTILINE)
        if found is None:
            self._ended = result.exit_code in (96, 97)
            raise _failed(result)
        self._ended = True
        self._size = int(found[2])
        self._result = ExecResult(int(found[1]), stderr=result.stderr)

    def _said(self, error: Exception) -> ProviderError:
        return translated(error, self._connection.id, self._connection.hidden)

    async def _leave(self) -> None:
        if not self._folder or self._connection.closed:
            return
        if not self._ended:
            await self._connection.end_tree(f"$(cat {self._folder}/run/pid 2>/dev/null)")
        with contextlib.suppress(SnapcoreError):  # the next handle sweeps
            await retried(self._remove, self._connection.id, self._connection.hidden, attempts=2)

    async def _remove(self) -> None:
        await self._connection.live().files.remove(self._folder, user=self._connection.user, request_timeout=REQUEST_SECONDS)


def _is_odd(script: str) -> bool:
    """Whether it holds bytes that are not UTF-8, which a command of the client cannot."""
    return any("\udc80" <= ch <= "\udcff" for ch in script)


def _failed(result: ExecResult) -> ProviderError:
    if result.exit_code == 97:
        return ProviderError("There is no place for temporary files in the E2B sandbox.", code=Code.NOT_CAPABLE)
    if result.exit_code == 96:
        return lost("what was sent did not arrive whole")
    if result.exit_code == 98:
        return lost("a command died, and whether it did all its work is not known")
    return lost(f"a command ended with {result.exit_code} and did not say what became of it")


async def _parts(stdin: bytes | AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Input in parts of some 8 MiB, each a list of pieces, none empty."""
    held: list[bytes] = []
    size = 0
    async for piece in _pieces(stdin):
        held.append(piece)
        size += len(piece)
        if size >= PART:
            yield held
            held, size = [], 0
    if size:
        yield held


async def _pieces(stdin: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Input in pieces of at most 8 MiB."""
    if isinstance(stdin, bytes):
        if stdin:
            yield stdin
        return
    async for piece in stdin:
        for start in range(0, len(piece), PART):
            yield piece if len(piece) <= PART else piece[start : start + PART]
