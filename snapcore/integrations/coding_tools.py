"""Tools with which a model works on the files of a sandbox, for loops without a framework.

    tools = CodingTools(handle, repo, thread_id="thread-1")
    result = await tools.dispatch(call.name, call.arguments)      # what the model sent
    result = await tools.edit("src/app.py", "DEBUG = True", "DEBUG = False")

Any `SandboxHandle` that runs commands will do. With a repository, the sandbox is captured before the first call that may change
it, after every few of them, and at the end.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Self

from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.redaction import Redactor
from snapcore.redaction_hooks import RedactionHook, RedactionPattern
from snapcore.repository import Repository, Secrets
from snapcore.sandboxes import SandboxHandle

from .coding_tools_arguments import CODING_TOOLS, MAX_LINES, Edit, Exec, ListFolder, ReadFile, WriteFile
from .coding_tools_checkpoints import CheckpointReport, StepCheckpoints
from .coding_tools_output import HeadAndTail, LineWindow
from .coding_tools_paths import Place, list_folder, resolve, set_mode
from .coding_tools_transfer import read_pieces, write_whole
from .tool_schemas import ToolError, ToolResult, Toolset, shown_path

__all__ = ["CodingTools"]

MAX_READ: Final = 64 << 10  # bytes of a file that one call shows
MAX_LOOKED_AT: Final = 128 << 20  # bytes of a file in which lines are looked for
MAX_OUTPUT: Final = 32 << 10  # bytes of stdout and of stderr that one call shows
MAX_EDIT: Final = 8 << 20  # bytes of a file that is edited
MAX_WRITE: Final = 8 << 20
MAX_ENTRIES: Final = 1_000
MAX_LISTED: Final = 64 << 10  # characters
MAX_COMMAND: Final = 64 << 10


class CodingTools(Toolset):
    """`read_file`, `write_file`, `edit`, `exec` and `list` over a sandbox: `dispatch` for calls as a model sends them, the
    methods for code. Both answer failures by a result with `is_error`.

    `repo` and `thread_id`: where checkpoints go; without, none are made. One is made before the first call that may change
    something (`baseline`), after every `every` of them, and by `close` (`at_end`). `capture` are more options of
    `Repository.capture`. What becomes of each is in the call's result, in `reports`, and told to `on_checkpoint`; a failed one
    fails nothing.

    `secrets`, `hooks` and `patterns` are taken out of what the model is shown, and out of checkpoints. `environment` is added
    to that of commands, which end after `timeout` seconds unless the model asks for another time, at most `max_timeout`. Calls
    that may change something are done one after another; the others beside them. The handle stays its owner's to close.
    """

    def __init__(
        self,
        handle: SandboxHandle,
        repo: Repository | None = None,
        *,
        thread_id: str | None = None,
        every: int = 5,
        baseline: bool = True,
        at_end: bool = True,
        capture: Mapping[str, Any] | None = None,
        on_checkpoint: Callable[[CheckpointReport], None] | None = None,
        secrets: Secrets = None,
        hooks: Sequence[RedactionHook] = (),
        patterns: Sequence[RedactionPattern] = (),
        environment: Mapping[str, str] | None = None,
        timeout: float = 120.0,
        max_timeout: float = 3600.0,
    ) -> None:
        if not all(hasattr(handle, name) for name in ("exec", "upload", "download", "abilities")):
            raise SnapshotError(
                f"{type(handle).__name__} runs no commands.", code=Code.INVALID_REQUEST, hint="Pass a SandboxHandle."
            )
        if (repo is None) != (thread_id is None):
            raise SnapshotError("Give both a repository and a thread, or neither.", code=Code.INVALID_REQUEST)
        if every < 1:
            raise SnapshotError("every is a number of calls, at least 1.", code=Code.INVALID_REQUEST)
        redactor = Redactor.build(secrets, hooks=hooks, patterns=patterns)
        handlers = (self._read_file, self._write_file, self._edit, self._exec, self._list)
        super().__init__(zip(CODING_TOOLS, handlers, strict=True), redactor)
        self._handle = handle
        self._environment = environment
        self._timeout = timeout
        self._max_timeout = max_timeout
        self._lock = asyncio.Lock()
        self._placeholders = re.compile("|".join(re.escape(f"{{secret:{name}}}") for name in redactor.names) or r"(?!)")
        self._checkpoints: StepCheckpoints | None = None
        if repo is not None and thread_id is not None:
            self._checkpoints = StepCheckpoints(
                repo,
                thread_id,
                handle,
                every=every,
                baseline=baseline,
                at_end=at_end,
                options={"secrets": secrets, "hooks": hooks, "patterns": patterns, **(capture or {})},
                on_report=on_checkpoint,
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, Exception):  # whoever is cancelled wants to leave
            await self.close()

    async def close(self) -> CheckpointReport | None:
        """Make the last checkpoint when something may have changed since the one before. The tools may be used on."""
        async with self._lock:
            return await self._checkpoints.finish() if self._checkpoints else None

    @property
    def reports(self) -> Sequence[CheckpointReport]:
        """What became of the latest automatic checkpoints, the newest last."""
        return tuple(self._checkpoints.reports) if self._checkpoints else ()

    # ---- for code

    async def read_file(self, path: str, *, start_line: int | None = None, max_lines: int | None = None) -> ToolResult:
        """`content`: the lines, bytes that are not UTF-8 as escapes; `next_line` when there are more. Of a binary file only its
        size is told."""
        return await self.dispatch("read_file", {"path": path, "start_line": start_line, "max_lines": max_lines})

    async def write_file(self, path: str, content: str, *, executable: bool | None = None) -> ToolResult:
        """Create or replace a file, in UTF-8; one that was there keeps its mode."""
        return await self.dispatch("write_file", {"path": path, "content": content, "executable": executable})

    async def edit(self, path: str, old_text: str, new_text: str, *, replace_all: bool = False) -> ToolResult:
        """Replace a text that is there exactly once; the file keeps its mode and its line endings."""
        arguments = {"path": path, "old_text": old_text, "new_text": new_text, "replace_all": replace_all}
        return await self.dispatch("edit", arguments)

    async def exec(self, command: str, *, cwd: str | None = None, timeout_seconds: int | None = None) -> ToolResult:
        """Run a command line: `exit_code`, `stdout`, `stderr`, each with its middle left out when it is long. A command that
        fails is no error of the tool; one that runs out of time is."""
        return await self.dispatch("exec", {"command": command, "cwd": cwd, "timeout_seconds": timeout_seconds})

    async def list(self, path: str = ".") -> ToolResult:
        """`entries` of a folder by name: `name`, `kind`, and of files `size` in bytes."""
        return await self.dispatch("list", {"path": path})

    # ---- what the tools do

    async def _read_file(self, given: ReadFile) -> dict[str, Any]:
        first = 1 if given.start_line is None else given.start_line
        count = MAX_LINES if given.max_lines is None else given.max_lines
        if first < 1 or not 1 <= count <= MAX_LINES:
            raise ToolError("INVALID_ARGUMENTS", f"Lines count from 1, and at most {MAX_LINES:,} are shown.")
        place = await self._existing_file(given.path)
        window = LineWindow(self._redactor, first, count, MAX_READ)
        looked_at = 0
        async with aclosing(read_pieces(self._handle, place)) as pieces:
            async for piece in pieces:
                window.add(piece)
                looked_at += len(piece)
                if window.full or window.binary:
                    break
                if looked_at > MAX_LOOKED_AT:
                    raise ToolError("TOO_LARGE", f"Line {first:,} is not in the first {MAX_LOOKED_AT:,} bytes.", "Use exec.")
        out: dict[str, Any] = {"path": shown_path(place.relative), "bytes": place.size}
        if window.binary:
            return out | {"binary": True, "content": "", "hint": "It is no text. Use exec to look into it."}
        text = window.text()
        if not text and first > 1:
            raise ToolError("NO_SUCH_LINE", f"{shown_path(place.relative)} has no line {first:,}.")
        out |= {"first_line": first, "lines": window.lines, "content": text}
        if window.cut:
            out["cut"] = f"Line {first + window.lines:,} is not shown to its end: a call shows at most {MAX_READ:,} bytes."
        if window.full and (place.size is None or window.end < place.size):
            out["next_line"] = first + max(window.lines, 1)
        return out

    async def _write_file(self, given: WriteFile) -> dict[str, Any]:
        data = given.content.encode()
        if len(data) > MAX_WRITE:
            raise ToolError("TOO_LARGE", f"The content has {len(data):,} bytes; at most {MAX_WRITE:,} are written.")
        self._refuse_placeholders(given.content)
        async with self._lock:
            baseline = await self._before()
            place = await resolve(self._handle, given.path, make=True)
            if place.kind not in ("file", "missing"):
                raise ToolError("NOT_A_FILE", f"{shown_path(place.relative)} is no file.")
            mode = place.mode
            if given.executable is not None:
                mode = 0o644 if mode is None else mode
                mode = mode | ((mode & 0o444) >> 2) if given.executable else mode & ~0o111
            done: dict[str, Any] = {"path": shown_path(place.relative), "bytes": len(data), "created": place.kind == "missing"}
            return await self._replace(place, data, mode, done, baseline)

    async def _edit(self, given: Edit) -> dict[str, Any]:
        if not given.old_text:
            raise ToolError("INVALID_ARGUMENTS", "old_text is empty.", "write_file makes a new file.")
        self._refuse_placeholders(given.new_text)
        async with self._lock:
            baseline = await self._before()
            place = await self._existing_file(given.path)
            data = bytearray()
            async with aclosing(read_pieces(self._handle, place)) as pieces:
                async for piece in pieces:
                    data += piece
                    if len(data) > MAX_EDIT:
                        raise ToolError("TOO_LARGE", f"A file of more than {MAX_EDIT:,} bytes is not edited.", "Use exec.")
            changed, count, line = _replaced(bytes(data), given, shown_path(place.relative))
            done = {"path": shown_path(place.relative), "replaced": count, "first_line": line}
            return await self._replace(place, changed, place.mode, done, baseline)

    async def _exec(self, given: Exec) -> dict[str, Any]:
        if not given.command.strip() or "\0" in given.command or len(given.command.encode()) > MAX_COMMAND:
            raise ToolError("INVALID_ARGUMENTS", f"A command is a text of 1 to {MAX_COMMAND:,} bytes without NUL.")
        seconds = self._timeout if given.timeout_seconds is None else float(min(given.timeout_seconds, self._max_timeout))
        if seconds <= 0:
            raise ToolError("INVALID_ARGUMENTS", "timeout_seconds is a number above 0.")
        async with self._lock:
            baseline = await self._before()
            cwd = None if given.cwd is None else await self._folder(given.cwd)
            shown = {name: HeadAndTail(self._redactor, MAX_OUTPUT) for name in ("stdout", "stderr")}
            out: dict[str, Any] = {}
            try:
                done = await self._handle.exec(
                    given.command,
                    cwd=cwd,
                    environment=self._environment,
                    timeout=seconds,
                    on_output=lambda stream, piece: shown[stream].add(piece),
                    max_output=0,
                )
                out["exit_code"] = done.exit_code
            except ProviderError as error:
                if error.code is not Code.EXEC_TIMEOUT:
                    raise
                out["exit_code"] = None
            for name, stream in shown.items():
                out[name], left_out = stream.text()
                if left_out:
                    out[f"{name}_bytes_left_out"] = left_out
            out = await self._after(out, baseline)
        if out["exit_code"] is None:
            raise ToolError(
                str(Code.EXEC_TIMEOUT),
                f"The command was stopped after {seconds:g} seconds.",
                "Give it more time, or run it in the background with its output in a file.",
                fields=out,
            )
        return out

    async def _list(self, given: ListFolder) -> dict[str, Any]:
        folder, listed, cut = await list_folder(self._handle, given.path or ".")
        entries: list[dict[str, Any]] = []
        room = MAX_LISTED
        for each in listed[:MAX_ENTRIES]:
            entry: dict[str, Any] = {"name": shown_path(each.name), "kind": each.kind}
            if each.kind == "file":
                entry |= {"size": each.size, **({"executable": True} if each.mode & 0o111 else {})}
            room -= len(entry["name"]) + 16
            if room < 0:
                break
            entries.append(entry)
        out: dict[str, Any] = {"path": shown_path(folder.relative), "entries": entries}
        if cut or len(entries) < len(listed):
            out |= {"more": True} if cut else {"left_out": len(listed) - len(entries)}
        return out

    # ---- parts

    async def _existing_file(self, path: str) -> Place:
        place = await resolve(self._handle, path)
        if place.kind == "missing":
            raise ToolError("NOT_FOUND", f"There is no {shown_path(place.relative)}.", "list shows what there is.")
        if place.kind != "file":
            what = "a folder" if place.kind == "folder" else "neither a file nor a folder"
            raise ToolError("NOT_A_FILE", f"{shown_path(place.relative)} is {what}.")
        return place

    async def _folder(self, path: str) -> str:
        place = await resolve(self._handle, path)
        if place.kind != "folder":
            raise ToolError("NOT_A_FOLDER", f"There is no folder {shown_path(place.relative)}.")
        return place.text

    async def _replace(
        self, place: Place, data: bytes, mode: int | None, done: dict[str, Any], baseline: CheckpointReport | None
    ) -> dict[str, Any]:
        """Put new content at a place, and the mode that is wanted."""
        await write_whole(self._handle, place, data)
        if mode is not None and not await set_mode(self._handle, place, mode):
            done["warning"] = f"The file's mode {mode:04o} could not be set."
        return await self._after(done, baseline)

    def _refuse_placeholders(self, text: str) -> None:
        found = self._placeholders.search(text)
        if found:
            raise ToolError(
                "SECRET_PLACEHOLDER",
                f"{found[0]} stands for a secret that is in a file; written back, the file would lose it.",
                "Edit other parts of the file with edit, and leave that part as it is.",
            )

    async def _before(self) -> CheckpointReport | None:
        return await self._checkpoints.begin() if self._checkpoints else None

    async def _after(self, out: dict[str, Any], baseline: CheckpointReport | None) -> dict[str, Any]:
        """The result of a call that may have changed something, with what became of checkpoints."""
        report = (await self._checkpoints.end() if self._checkpoints else None) or baseline
        return out if report is None else {**out, "checkpoint": report.fields()}


def _replaced(data: bytes, given: Edit, shown: str) -> tuple[bytes, int, int]:
    """The new content, the number of replacements and the line of the first."""
    if b"\0" in data[:8_192]:
        raise ToolError("BINARY", f"{shown} is no text.", "Use exec to change it.")
    old, new = given.old_text.encode(), given.new_text.encode()
    breaks = data.count(b"\n")
    if breaks and data.count(b"\r\n") == breaks:
        old, new = (text.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") for text in (old, new))
    count = data.count(old)
    if not count:
        raise ToolError("NO_MATCH", f"{shown} does not hold old_text.", "Read the file, and copy the text exactly.")
    if count > 1 and not given.replace_all:
        raise ToolError(
            "SEVERAL_MATCHES", f"{shown} holds old_text {count:,} times.", "Give more of what is around it, or set replace_all."
        )
    return data.replace(old, new), count, data.count(b"\n", 0, data.find(old)) + 1
