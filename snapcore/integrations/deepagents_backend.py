"""A sandbox of snapcore as a backend of deepagents: its shell and its files, whatever the image has besides `sh`, `find` and
`grep`."""

import base64
import posixpath
import secrets
from collections.abc import Callable
from typing import Any, Final, TypeVar

from snapcore.errors import Code, ProviderError, SnapcoreError, SnapshotError, printable
from snapcore.sandboxes import ExecResult, SandboxHandle

from .langgraph_home import Home

try:
    from deepagents.backends.protocol import (
        FILE_NOT_FOUND,
        INVALID_PATH,
        IS_DIRECTORY,
        PERMISSION_DENIED,
        DeleteResult,
        EditResult,
        ExecuteResponse,
        FileData,
        FileDownloadResponse,
        FileUploadResponse,
        GlobResult,
        GrepMatch,
        GrepResult,
        LsResult,
        ReadResult,
        SandboxBackendProtocol,
        WriteResult,
    )
    from deepagents.backends.utils import compile_grep_include_glob, perform_string_replacement, slice_read_response
except ImportError as error:
    raise SnapcoreError(
        "deepagents is not installed.", code=Code.MISSING_EXTRA, hint="Install it: pip install 'snapcore[deepagents]'."
    ) from error

__all__ = ["HandleBackend"]

T = TypeVar("T")

MAX_OUTPUT: Final = 256 << 10  # of a command, for a model
MAX_LISTING: Final = 16 << 20
MAX_READ: Final = 10 << 20  # as in the backends of deepagents
COMMAND_SECONDS: Final = 600
TIMED_OUT: Final = 124  # as coreutils' timeout says it

LIST: Final = r"""
[ -e "$1" ] || [ -L "$1" ] || exit 20
[ -d "$1" ] || exit 22
cd -- "$1" || exit 23
for f in * .*; do
    case $f in .|..) continue ;; esac
    if [ -d "$f" ] && [ ! -L "$f" ]; then printf 'd%s\0' "$f"; elif [ -e "$f" ] || [ -L "$f" ]; then printf 'f%s\0' "$f"; fi
done
"""
FIND: Final = r"""
[ -e "$1" ] || exit 20
find "$1" -type f -exec printf '%s\0' {} +
exit 0
"""
GREP: Final = r"""
[ -e "$1" ] || exit 20
find "$1" -name .git -prune -o -type f -exec grep -lF -e "$2" {} + | while IFS= read -r f; do
    printf '%s\0' "$f"
    grep -nF -e "$2" "$f"
    printf '\0'
done
"""
PUT: Final = r"""
[ -d "$1" ] && exit 21
folder=${1%/*}
mkdir -p -- "${folder:-/}" || exit 23
if [ -n "$3" ]; then cat <"$3" >"$1"; else cat >"$1"; fi || exit 23
[ "$(($(wc -c <"$1")))" = "$2" ] || exit 24
"""
"""Writes into the file that is there, so that it keeps its mode and owner. The third argument is a file to copy, or empty."""
DELETE: Final = r"""
[ -e "$1" ] || [ -L "$1" ] || exit 20
rm -rf -- "$1" || exit 23
"""
NAMES: Final = {20: FILE_NOT_FOUND, 21: IS_DIRECTORY, 22: "not_a_directory", 24: "the file did not arrive whole"}


class HandleBackend(SandboxBackendProtocol):
    """Paths are the sandbox's own. Commands start in `handle.workspace_root`, once that is there.

    Every method may be called from any thread and from any event loop, besides that a blocking one cannot be called on the loop
    where this was made: threads that call them wait for that loop, so leave it some of its own. Trouble with the sandbox comes
    back as the result's `error`, as deepagents wants it, and as exit code 124 for a command that took more than `timeout`
    seconds, which is ended.
    """

    def __init__(self, handle: SandboxHandle, *, timeout: int = COMMAND_SECONDS, max_output: int = MAX_OUTPUT) -> None:
        self.handle = handle
        self._timeout = timeout
        self._max_output = max_output
        self._home = Home.here()

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self.handle.sandbox_id

    # ---- commands

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command by `sh`, stdout and stderr in the order in which they come. 0 seconds are no limit."""
        return self._home.run(self._execute(command, timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """See `execute`."""
        return await self._home.arun(self._execute(command, timeout))

    async def _execute(self, command: str, timeout: int | None) -> ExecuteResponse:
        said = bytearray()
        seconds = self._timeout if timeout is None else timeout

        def hear(_: str, piece: bytes) -> None:
            said.extend(piece[: max(0, self._max_output + 1 - len(said))])

        try:
            result = await self.handle.exec(command, timeout=seconds or None, on_output=hear, max_output=1)
        except SnapcoreError as error:
            code = TIMED_OUT if error.code == Code.EXEC_TIMEOUT else 1
            return ExecuteResponse(f"{_text(said)}\nError: {error}".lstrip(), code)
        return ExecuteResponse(_text(said[: self._max_output]), result.exit_code, len(said) > self._max_output)

    # ---- files

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """Lines of a text file, or a whole other file in base64; at most 10 MiB."""
        return self._home.run(self._read(file_path, offset, limit))

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """See `read`."""
        return await self._home.arun(self._read(file_path, offset, limit))

    async def _read(self, path: str, offset: int, limit: int) -> ReadResult:
        found = await self._download(path, MAX_READ)
        if found.content is None:
            return ReadResult(error=f"File '{path}': {found.error}")
        try:
            text = found.content.decode()
        except UnicodeDecodeError:
            return ReadResult(file_data=FileData(content=base64.standard_b64encode(found.content).decode(), encoding="base64"))
        return slice_read_response(FileData(content=text, encoding="utf-8"), offset, limit)

    def write(self, file_path: str, content: str) -> WriteResult:
        """Create or overwrite a file, with its folders. A file that is there keeps its mode."""
        return self._home.run(self._write(file_path, content))

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        """See `write`."""
        return await self._home.arun(self._write(file_path, content))

    async def _write(self, path: str, content: str) -> WriteResult:
        done = await self._upload(path, content.encode("utf-8", "surrogatepass"))
        return WriteResult(path=path) if done.error is None else WriteResult(error=f"Error writing file '{path}': {done.error}")

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """Replace a text in a file. The line ends of the file stay; `\\n` in the texts stands for them."""
        return self._home.run(self._edit(file_path, old_string, new_string, replace_all))

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """See `edit`."""
        return await self._home.arun(self._edit(file_path, old_string, new_string, replace_all))

    async def _edit(self, path: str, old: str, new: str, replace_all: bool) -> EditResult:
        found = await self._download(path, MAX_READ)
        if found.content is None:
            return EditResult(error=f"Error: File '{path}': {found.error}")
        try:
            text = found.content.decode()
        except UnicodeDecodeError:
            return EditResult(error=f"Error: File '{path}' is no UTF-8 text")
        if old not in text and "\r\n" in text:  # a model sees line ends as \n
            old, new = (each.replace("\r\n", "\n").replace("\n", "\r\n") for each in (old, new))
        replaced = perform_string_replacement(text, old, new, replace_all)
        if isinstance(replaced, str):
            return EditResult(error=replaced)
        done = await self._upload(path, replaced[0].encode())
        if done.error is not None:
            return EditResult(error=f"Error editing file '{path}': {done.error}")
        return EditResult(path=path, occurrences=replaced[1])

    def delete(self, file_path: str) -> DeleteResult:
        """Remove a file, or a folder with all that is in it."""
        return self._home.run(self._delete(file_path))

    async def adelete(self, file_path: str) -> DeleteResult:
        """See `delete`."""
        return await self._home.arun(self._delete(file_path))

    async def _delete(self, path: str) -> DeleteResult:
        error = await self._attempt(DELETE, lambda _: None, path)
        return DeleteResult(path=path) if error is None else DeleteResult(error=f"Error deleting '{path}': {error}")

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files one after another, as `write` does."""
        return self._home.run(self._upload_files(files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """See `upload_files`."""
        return await self._home.arun(self._upload_files(files))

    async def _upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [await self._upload(path, data) for path, data in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """The bytes of files."""
        return self._home.run(self._download_files(paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """See `download_files`."""
        return await self._home.arun(self._download_files(paths))

    async def _download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [await self._download(path) for path in paths]

    # ---- looking around

    def ls(self, path: str) -> LsResult:
        """The entries of a folder."""
        return self._home.run(self._ls(path))

    async def als(self, path: str) -> LsResult:
        """See `ls`."""
        return await self._home.arun(self._ls(path))

    async def _ls(self, path: str) -> LsResult:
        def entries(output: bytes) -> LsResult:
            found = sorted((_text(each[1:]), each[:1] == b"d") for each in output.split(b"\0")[:-1])
            return LsResult(entries=[{"path": posixpath.join(path, name), "is_dir": folder} for name, folder in found])

        found = await self._attempt(LIST, entries, path)
        return LsResult(error=f"Path '{path}': {found}") if isinstance(found, str) else found

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        """Files below `path`, the workspace by default, whose path matches."""
        return self._home.run(self._glob(pattern, path))

    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        """See `glob`."""
        return await self._home.arun(self._glob(pattern, path))

    async def _glob(self, pattern: str, path: str | None) -> GlobResult:
        base = self._base(path)

        def matching(output: bytes) -> GlobResult:
            matches = compile_grep_include_glob(pattern)
            found = sorted(map(_text, output.split(b"\0")[:-1]))
            return GlobResult(matches=[{"path": each, "is_dir": False} for each in found if matches(_below(each, base))])

        try:
            found = await self._attempt(FIND, matching, base)
        except ValueError as error:  # the pattern
            return GlobResult(error=str(error))
        return GlobResult(error=f"Path '{base}': {found}") if isinstance(found, str) else found

    def grep(self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None) -> GrepResult:
        """Lines that hold a text, in files below `path`, the workspace by default; `.git` is left out."""
        return self._home.run(self._grep(pattern, path, glob, max_count))

    async def agrep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        """See `grep`."""
        return await self._home.arun(self._grep(pattern, path, glob, max_count))

    async def _grep(self, pattern: str, path: str | None, glob: str | None, max_count: int | None) -> GrepResult:
        base = self._base(path)

        def matching(output: bytes) -> list[GrepMatch]:
            parts = output.split(b"\0")
            wanted = compile_grep_include_glob(glob) if glob else lambda _: True
            found = []
            for name, lines in zip(parts[::2], parts[1::2], strict=False):
                if wanted(_below(_text(name), base)):
                    found += _matches(_text(name), lines)
            return found

        try:
            found = await self._attempt(GREP, matching, base, pattern)
        except ValueError as error:
            return GrepResult(error=str(error))
        if isinstance(found, str):
            return GrepResult(error=f"Path '{base}': {found}")
        return GrepResult(matches=found[:max_count], truncated=max_count is not None and len(found) > max_count)

    # ---- parts

    def _base(self, path: str | None) -> str:
        return posixpath.normpath(posixpath.join(self.handle.workspace_root, path or "."))

    async def _attempt(self, script: str, use: Callable[[bytes], T], *arguments: str) -> T | str:
        """Run a script and make something of its output; or what went wrong, in words."""
        try:
            result = await self._run(script, *arguments)
        except SnapcoreError as error:
            return str(error)
        if result.exit_code:
            return _trouble(result)
        if result.truncated:
            return "there is too much; narrow it down"
        return use(result.stdout)

    async def _run(self, script: str, *arguments: str, stdin: bytes = b"") -> ExecResult:
        return await self.handle.exec(
            ["sh", "-c", script, "sh", *arguments], stdin=stdin, timeout=self._timeout or None, max_output=MAX_LISTING
        )

    async def _upload(self, path: str, data: bytes) -> FileUploadResponse:
        if not path.startswith("/"):
            return FileUploadResponse(path, INVALID_PATH)
        try:
            result = await self._put(path, data)
        except SnapshotError:
            return FileUploadResponse(path, INVALID_PATH)
        except (SnapcoreError, OSError) as error:
            return FileUploadResponse(path, str(error))
        return FileUploadResponse(path, _trouble(result) if result.exit_code else None)

    async def _put(self, path: str, data: bytes) -> ExecResult:
        if self.handle.abilities.binary_pipes:
            return await self._run(PUT, path, str(len(data)), "", stdin=data)
        draft = f"/tmp/.snapcore-upload-{secrets.token_hex(8)}"  # noqa: S108 (in the sandbox)
        await self.handle.upload(draft, data)
        return await self._run(f"trap 'rm -f -- \"$3\"' EXIT\n{PUT}", path, str(len(data)), draft)

    async def _download(self, path: str, limit: int | None = None) -> FileDownloadResponse:
        data = bytearray()
        try:
            async for piece in self.handle.download(path):
                data += piece
                if limit is not None and len(data) > limit:
                    return FileDownloadResponse(path, error=f"larger than {limit >> 20} MiB; look at parts of it with a command")
        except FileNotFoundError:
            return FileDownloadResponse(path, error=FILE_NOT_FOUND)
        except IsADirectoryError:
            return FileDownloadResponse(path, error=IS_DIRECTORY)
        except PermissionError:
            return FileDownloadResponse(path, error=PERMISSION_DENIED)
        except SnapshotError:
            return FileDownloadResponse(path, error=INVALID_PATH)
        except (ProviderError, OSError) as error:
            return FileDownloadResponse(path, error=str(error))
        return FileDownloadResponse(path, bytes(data))


def _matches(path: str, lines: bytes) -> list[GrepMatch]:
    found: list[GrepMatch] = []
    for line in lines.split(b"\n"):
        number, _, text = line.partition(b":")
        if number.isdigit():  # not what grep says of a binary file
            found.append({"path": path, "line": int(number), "text": _text(text)})
    return found


def _below(path: str, base: str) -> str:
    return path.removeprefix(base.rstrip("/") + "/") if path != base else posixpath.basename(path)


def _trouble(result: ExecResult) -> str:
    if b"Permission denied" in result.stderr:
        return PERMISSION_DENIED
    return NAMES.get(result.exit_code) or printable(result.stderr.strip()[-300:]) or f"exit code {result.exit_code}"


def _text(data: Any) -> str:
    return bytes(data).decode("utf-8", "replace")
