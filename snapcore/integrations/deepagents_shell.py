"""`sh` in a sandbox of deepagents, with bytes in and out. Its `execute` answers with text, both streams in one, possibly cut: so
only one line of ours is looked for in what it says, and bytes go through files, by upload and download.

A pipe is a folder in the sandbox: input comes in parts, output and stderr are files. Sizes are checked on both sides.
"""

import asyncio
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Final, TypeVar

from snapcore.errors import Code, ProviderError, SnapcoreError, printable
from snapcore.providers.e2b_shell import END_OF_TREE
from snapcore.providers.shell_exec import new_mark
from snapcore.providers.threads import uncancelled
from snapcore.sandboxes import ExecResult

try:
    from deepagents.backends.protocol import SandboxBackendProtocol, execute_accepts_timeout
except ImportError as error:
    raise SnapcoreError(
        "deepagents is not installed.", code=Code.MISSING_EXTRA, hint="Install it: pip install 'snapcore[deepagents]'."
    ) from error

__all__ = ["BackendPipe", "BackendShell"]

T = TypeVar("T")

PART: Final = 8 << 20  # bytes held, sent and fetched at once
MAX_COMMAND: Final = 96 << 10  # Linux takes 128 KiB in one argument, in which a backend may put the whole command
RUN_SECONDS: Final = 3600
DOWNLOADS: Final = 3
STDERR_KEPT: Final = 8 << 10

PREPARE: Final = r"""
umask 077
d=/tmp/.snapcore-pipes-$(id -u)
mkdir "$d" 2>/dev/null
if [ ! -d "$d" ] || [ -L "$d" ] || [ ! -O "$d" ] || ! chmod 700 "$d"; then exit 97; fi
for f in "$d"/*; do
    [ -d "$f" ] || continue
    [ -z "$(find "$f" -mmin -30 2>&1 | head -n 1)" ] || continue
    p=$(cat "$f/pid" 2>/dev/null)
    if [ -n "$p" ] && kill -0 "$p" 2>/dev/null; then continue; fi
    rm -rf "$f"
done
"""
"""Makes the folder of all pipes, its user's own, and removes pipes that have not changed for half an hour and do not run."""

RUN: Final = r"""
umask 077
mkdir -p "$d" 2>/dev/null && cd "$d" && echo $$ >pid || { echo; echo "$mark gone"; exit 0; }
for s in $sizes; do
    n=$((n + 1)); [ "$(($(wc -c <in.$n)))" = "$s" ] || { echo; echo "$mark missing"; exit 0; }
done 2>/dev/null
[ -n "$script" ] || [ -f script ] || { echo; echo "$mark missing"; exit 0; }
i=0
while [ $i -lt "${n:-0}" ]; do
    i=$((i + 1)); cat in.$i || break; rm -f in.$i
done 2>/dev/null | (
    SNAPCORE_PIPE=$d; export SNAPCORE_PIPE
    umask 022
    cd / || exit 97
    if [ -n "$script" ]; then exec sh -c "$script"; else exec sh "$d/script"; fi
) >out 2>err
c=$?
rm -f pid
echo; echo "$mark $c $(($(wc -c <out))) $(($(wc -c <err)))"
"""
"""Runs the script, with the folder's path in SNAPCORE_PIPE, and says how it ended and how much it said on stdout and stderr. `d`,
`mark`, `sizes`, `script` and `n=0` are set before it."""


class BackendShell:
    """See `Shell`. `sandbox_id` is `deepagents://`, the backend's class and its id."""

    def __init__(self, backend: SandboxBackendProtocol) -> None:
        self._backend = backend
        self._timed = execute_accepts_timeout(type(backend))
        self._folder = ""
        self._preparing = asyncio.Lock()
        self.closed = False

    @property
    def sandbox_id(self) -> str:
        """See `Shell.sandbox_id`."""
        return f"deepagents://{type(self._backend).__name__}/{printable(self._backend.id)}"

    def pipe(self, script: str, stdin: bytes | AsyncIterator[bytes] = b"", *, seconds: float | None = None) -> "BackendPipe":
        """See `Shell.pipe`. All input is sent and the script has ended when the `async with` is entered; after `seconds` it is
        ended, with `ProviderError` `EXEC_TIMEOUT`."""
        return BackendPipe(self, script, stdin, seconds)

    async def run(self, command: str) -> str:
        """What `execute` says, all or not: only what was looked for and found in it counts."""
        if self._timed:
            answer = await self._asked(lambda: self._backend.aexecute(command, timeout=RUN_SECONDS))
        else:
            answer = await self._asked(lambda: self._backend.aexecute(command))
        return answer.output

    async def folder(self) -> str:
        """Where pipes of the commands' user are; made, and swept, once."""
        async with self._preparing:
            if not self._folder:
                mark = new_mark()
                said = await self.run(f'({PREPARE})\nc=$?; echo; echo "{mark} $c $(id -u)"')
                found = re.search(rf"^{mark} (\d+) (\d{{1,10}})$", said, re.MULTILINE)
                if found is None:
                    raise _lost("a command does not say how it ended", retryable=True)
                if found[1] != "0":
                    raise ProviderError(
                        "There is no place for temporary files in the sandbox.",
                        code=Code.NOT_CAPABLE,
                        hint="They go into a folder below its /tmp, which must be writable.",
                    )
                self._folder = f"/tmp/.snapcore-pipes-{found[2]}"  # noqa: S108 (in the sandbox)
            return self._folder

    async def send(self, path: str, data: bytes) -> None:
        """Upload a file."""
        answers = await self._asked(lambda: self._backend.aupload_files([(path, data)]))
        if len(answers) != 1 or answers[0].error:
            words = answers[0].error if answers else "no answer"
            raise ProviderError(
                f"The sandbox does not take an upload to {path}: {printable(str(words))}.",
                code=Code.NOT_CAPABLE,
                hint="Uploads have to reach the very files that commands see, as the same user.",
            )

    async def fetch(self, path: str, size: int) -> bytes:
        """Download a file of a known size. One that comes shorter or longer is asked for again, then an error."""
        words = ""
        for _ in range(DOWNLOADS):
            answers = await self._asked(lambda: self._backend.adownload_files([path]))
            found = answers[0].content if answers else None
            if found is not None and len(found) == size:
                return found
            words = "another length than the file has" if found is not None else str(answers[0].error if answers else "no answer")
        raise _lost(f"a download came with {printable(words)}", retryable=True)

    async def _asked(self, call: Callable[[], Awaitable[T]]) -> T:
        if self.closed:
            raise ProviderError("This handle is closed.", hint="Open the sandbox again.")
        try:
            return await call()
        except Exception as error:
            # whatever client a backend is made of raises what it likes; its words may hold what must not be shown
            raise _lost(f"its backend raised {type(error).__name__}", retryable=True) from error


class BackendPipe:
    """One script that runs once."""

    def __init__(self, shell: BackendShell, script: str, stdin: bytes | AsyncIterator[bytes], seconds: float | None) -> None:
        self._shell = shell
        self._script = script
        self._stdin = stdin
        self._seconds = seconds
        self._mark = new_mark()
        self._folder = ""
        self._code = 0
        self._size = 0
        self._stderr_size = 0
        self._made = False
        self._ended = False

    async def __aenter__(self) -> "BackendPipe":
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
        """See `Pipe.stdout`. More than 8 MiB come in parts, each cut off by a command of its own."""
        async for piece in self._read("out", self._size):
            yield piece

    async def stderr(self) -> AsyncIterator[bytes]:
        """The same for all of stderr."""
        async for piece in self._read("err", self._stderr_size):
            yield piece

    async def wait(self) -> ExecResult:
        """See `Pipe.wait`."""
        last = b""
        async for piece in self._read("err", self._stderr_size, max(0, self._stderr_size - STDERR_KEPT) >> 20):
            last = (last + piece)[-STDERR_KEPT:]
        return ExecResult(self._code, stderr=last)

    async def _read(self, name: str, size: int, first: int = 0) -> AsyncIterator[bytes]:
        """A file of the pipe, from its MiB `first` on."""
        if 0 < size <= PART:
            yield await self._shell.fetch(f"{self._folder}/{name}", size)
            return
        for start in range(first << 20, size, PART):
            length = min(PART, size - start)
            cut = f"dd if={name} of={name}.part bs={1 << 20} skip={start >> 20} count={PART >> 20}"
            said = await self._shell.run(
                f"(cd {self._folder} && {cut} 2>/dev/null && echo && echo {self._mark} $(wc -c <{name}.part))"
            )
            if not re.search(rf"^{self._mark} {length}$", said, re.MULTILINE):
                raise _lost("its output cannot be read", retryable=True)
            yield await self._shell.fetch(f"{self._folder}/{name}.part", length)

    async def _send(self) -> list[int]:
        """Send the script if need be, and the input in parts; their sizes."""
        odd = any("\udc80" <= ch <= "\udcff" for ch in self._script)
        if odd or len(self._command([]).encode("utf-8", "surrogateescape")) > MAX_COMMAND:
            await self._upload("script", self._script.encode("utf-8", "surrogateescape"))
            self._script = ""
        sizes: list[int] = []
        async for part in _parts(self._stdin):
            sizes.append(len(part))
            await self._upload(f"in.{len(sizes)}", part)
        return sizes

    async def _upload(self, name: str, data: bytes) -> None:
        if not self._made:  # by the commands' user, whoever uploads
            await self._shell.run(f"(umask 077; mkdir {self._folder})")
            self._made = True
        await self._shell.send(f"{self._folder}/{name}", data)

    def _command(self, sizes: list[int]) -> str:
        """All in a shell of its own: the backend's may be one that lives on."""
        words = {"d": self._folder, "mark": self._mark, "sizes": " ".join(map(str, sizes)), "script": self._script, "n": "0"}
        given = "\n".join(f"{name}={shlex.quote(word)}" for name, word in words.items())
        return f"sh -c {shlex.quote(given + RUN)}"

    async def _run(self, sizes: list[int]) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                said = await self._shell.run(self._command(sizes))
        except TimeoutError:
            raise ProviderError(
                f"The command did not end within {self._seconds:g} seconds and was stopped.", code=Code.EXEC_TIMEOUT
            ) from None
        if re.search(rf"^{self._mark} (missing|gone)$", said, re.MULTILINE):
            self._ended = True
            raise _lost("what was sent did not arrive whole", retryable=True)
        found = re.search(rf"^{self._mark} (\d{{1,3}}) (\d{{1,18}}) (\d{{1,18}})$", said, re.MULTILINE)
        if found is None:
            raise _lost("a command does not say how it ended, and whether it did all its work is not known", retryable=False)
        self._ended = True
        self._code, self._size, self._stderr_size = map(int, found.groups())

    async def _leave(self) -> None:
        if self._shell.closed or not self._folder:
            return
        end = "" if self._ended else f"(more=; p=$(cat {self._folder}/pid 2>/dev/null){END_OF_TREE})\n"
        try:
            await self._shell.run(f"{end}rm -rf {self._folder}")
        except ProviderError:
            return  # the next pipe sweeps


def _lost(what: str, *, retryable: bool) -> ProviderError:
    return ProviderError(
        f"The sandbox cannot be relied on just now: {what}.",
        code=Code.SANDBOX_UNAVAILABLE,
        hint="Try again; if it stays, see whether the sandbox still runs.",
        retryable=retryable,
    )


async def _parts(stdin: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Input in parts of 8 MiB, the last one shorter, none empty."""
    held = bytearray()
    async for piece in _pieces(stdin):
        for start in range(0, len(piece), PART):
            held += piece[start : start + PART]
            if len(held) >= PART:
                yield bytes(held[:PART])
                del held[:PART]
    if held:
        yield bytes(held)


async def _pieces(stdin: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if isinstance(stdin, bytes):
        yield stdin
        return
    async for piece in stdin:
        yield piece
