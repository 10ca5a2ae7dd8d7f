"""Tools with which a model saves, compares and looks into the checkpoints of its own thread.

    tools = AgentTools(repo, "thread-1", handle)
    client.chat.completions.create(..., tools=tools.chat_tools())
    result = await tools.dispatch(call.function.name, call.function.arguments)

The thread is bound here, by the developer. A model names checkpoints by id or label and has no way to name a thread: an id of
another thread is answered as one that does not exist.
"""

import asyncio
import base64
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from snapcore.errors import CheckpointConflictError, SnapshotError, printable
from snapcore.model import Checkpoint, validate_id, validate_text, validate_thread_id
from snapcore.redaction import Redactor
from snapcore.redaction_hooks import RedactionHook, RedactionPattern
from snapcore.repository import Repository, Secrets

from .agent_tools_arguments import (
    DEFAULT_LISTED,
    DIFF,
    FORK,
    LIST,
    MAX_ARTIFACTS,
    MAX_LABEL,
    MAX_LISTED,
    PREVIEW,
    READ,
    RESTORE,
    SAVE,
    Artifact,
    Compare,
    List,
    ReadArtifact,
    Save,
    Which,
)
from .coding_tools_output import shown_text
from .tool_schemas import Handler, Tool, ToolError, ToolResult, Toolset, bounded, shown_path

__all__ = ["AgentTools", "Options"]

MAX_ARTIFACT_BYTES: Final = 1 << 20  # of all that one call saves
MAX_READ: Final = 64 << 10  # characters, or bytes of what is no text
MAX_READABLE: Final = 64 << 20
MAX_PATHS: Final = 100

Shown = TypeVar("Shown", str, bytes)
Options = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""Options for the repository's own call, or what gives them at each call: the conversation as it is then, say."""


class AgentTools(Toolset):
    """Tools over one thread of a repository: `dispatch` for calls as a model sends them, the methods for code. Both answer
    failures by a result with `is_error`.

    `sandbox` is a handle or an address: without, nothing can be saved or previewed, and those tools are not there. `fork_to`
    names the thread that a fork of the given checkpoint goes to; without, there is no fork. `allow_restore` gives the model the
    tool that restores; what is there is captured first unless `restore` says otherwise. `capture` and `restore` are more options
    of `Repository.capture` and `Repository.restore`. `show_forks` tells the model the name of the thread that `fork_to` chose;
    `forks` always has those that were made. `secrets`, `hooks` and `patterns` are taken out of what is saved and shown.
    """

    def __init__(
        self,
        repo: Repository,
        thread_id: str,
        sandbox: Any = None,
        *,
        fork_to: Callable[[Checkpoint], str | Awaitable[str]] | None = None,
        allow_restore: bool = False,
        capture: Options | None = None,
        restore: Options | None = None,
        show_forks: bool = False,
        secrets: Secrets = None,
        hooks: Sequence[RedactionHook] = (),
        patterns: Sequence[RedactionPattern] = (),
    ) -> None:
        validate_thread_id(thread_id)
        self._repo = repo
        self._thread_id = thread_id
        self._sandbox = sandbox
        self._fork_to = fork_to
        self._capture = capture
        self._restore_options = restore
        self._show_forks = show_forks
        self._known: dict[str, Any] = {"secrets": secrets, "hooks": hooks, "patterns": patterns}
        self._lock = asyncio.Lock()
        self.forks: list[Checkpoint] = []
        offered: list[tuple[Tool, Handler]] = [(LIST, self._list), (DIFF, self._diff), (READ, self._read_artifact)]
        if sandbox is not None:
            offered = [(SAVE, self._save), *offered, (PREVIEW, self._preview)]
        if fork_to is not None:
            offered.append((FORK, self._fork))
        if allow_restore and sandbox is not None:
            offered.append((RESTORE, self._restore))
        super().__init__(offered, Redactor.build(secrets, hooks=hooks, patterns=patterns))

    # ---- for code

    async def save(self, label: str | None = None, *, artifacts: Mapping[str, str] | None = None) -> ToolResult:
        """Capture the sandbox; `checkpoint`, `created`, and what was left out or changed meanwhile."""
        kept = [{"name": name, "text": text} for name, text in (artifacts or {}).items()]
        return await self.dispatch(SAVE.name, {"label": label, "artifacts": kept or None})

    async def list(self, limit: int | None = None) -> ToolResult:
        """`checkpoints`, the newest first, and how many there are (`count`)."""
        return await self.dispatch(LIST.name, {"limit": limit})

    async def diff(self, before: str, after: str | None = None) -> ToolResult:
        """`added`, `changed` and `removed` paths."""
        return await self.dispatch(DIFF.name, {"before": before, "after": after})

    async def fork(self, checkpoint: str = "latest") -> ToolResult:
        """Fork to the thread that `fork_to` names."""
        return await self.dispatch(FORK.name, {"checkpoint": checkpoint})

    async def restore_preview(self, checkpoint: str = "latest") -> ToolResult:
        """What a restore would remove, add and change."""
        return await self.dispatch(PREVIEW.name, {"checkpoint": checkpoint})

    async def restore(self, checkpoint: str) -> ToolResult:
        """Restore, where that is allowed."""
        return await self.dispatch(RESTORE.name, {"checkpoint": checkpoint})

    async def read_artifact(self, checkpoint: str, name: str, *, offset: int | None = None) -> ToolResult:
        """`text` of an artifact, or `base64` of one that is no text, from `offset`; `next_offset` when there is more."""
        return await self.dispatch(READ.name, {"checkpoint": checkpoint, "name": name, "offset": offset})

    # ---- what the tools do

    async def _save(self, given: Save) -> dict[str, Any]:
        if given.label is not None:
            _check_name(given.label, "A label")
            if given.label == "latest":
                raise ToolError("INVALID_ARGUMENTS", "'latest' always names the newest checkpoint and is no label.")
        artifacts = _artifacts(given.artifacts or [])
        options = self._options(self._capture)
        options["artifacts"] = {**(options.get("artifacts") or {}), **artifacts}
        async with self._lock:
            report = await self._repo.capture_with_report(
                self._sandbox, **{**options, "thread_id": self._thread_id, "label": given.label}
            )
        out: dict[str, Any] = {"checkpoint": _told(report.checkpoint), "created": report.created}
        if report.skipped:
            out["left_out"] = bounded(
                [f"{shown_path(each.path)}: {printable(each.reason)}" for each in report.skipped], MAX_PATHS
            )
        if report.warnings:
            out["warnings"] = bounded([printable(each) for each in report.warnings], MAX_PATHS)
        return out

    async def _list(self, given: List) -> dict[str, Any]:
        limit = DEFAULT_LISTED if given.limit is None else given.limit
        if not 1 <= limit <= MAX_LISTED:
            raise ToolError("INVALID_ARGUMENTS", f"limit is a number from 1 to {MAX_LISTED}.")
        found = await self._repo.list(self._thread_id)
        return {"count": len(found), "checkpoints": [_told(each) for each in found[: -limit - 1 : -1]]}

    async def _diff(self, given: Compare) -> dict[str, Any]:
        before, after = await self._find(given.before), await self._find(given.after or "latest")
        found = await self._repo.diff(before, after)
        several = len({root.name for each in (before, after) for root in each.roots}) > 1
        out: dict[str, Any] = {"before": before.id, "after": after.id}
        for name, entries in (("added", found.added), ("changed", found.changed), ("removed", found.removed)):
            paths = [f"{printable(each.root)}:{shown_path(each.path)}" if several else shown_path(each.path) for each in entries]
            out[name] = bounded(paths, MAX_PATHS)
        return out

    async def _fork(self, given: Which) -> dict[str, Any]:
        source = await self._find(given.checkpoint)
        assert self._fork_to is not None
        named = self._fork_to(source)
        destination = await named if inspect.isawaitable(named) else named
        try:
            async with self._lock:
                fork = await self._repo.fork(self._thread_id, source.id, to_thread_id=destination)
        except CheckpointConflictError as error:
            raise ToolError(str(error.code), "The place where the fork was to go is taken.") from error
        self.forks.append(fork)
        out: dict[str, Any] = {"forked_from": source.id, "checkpoint": _told(fork)}
        return {**out, "thread": printable(destination)} if self._show_forks else out

    async def _preview(self, given: Which) -> dict[str, Any]:
        source = await self._find(given.checkpoint)
        options = self._options(self._restore_options) | {"safety_checkpoint": False, "dry_run": True, "allow_empty": True}
        receipt = await self._repo.restore(self._sandbox, **self._bound(options, source))
        plan = receipt.plan if receipt is not None else None
        if plan is None:
            raise _not_found(given.checkpoint)
        parts = {"removes": plan.removes, "adds": plan.adds, "changes": plan.changes}
        out = {name: bounded([shown_path(path) for path in paths], MAX_PATHS) for name, paths in parts.items()}
        return {"checkpoint": source.id, **out, "bytes": plan.bytes}

    async def _restore(self, given: Which) -> dict[str, Any]:
        source = await self._find(given.checkpoint)
        options = {"safety_checkpoint": True, **self._options(self._restore_options)}
        async with self._lock:
            receipt = await self._repo.restore(self._sandbox, **self._bound(options, source))
        if receipt is None:
            raise _not_found(given.checkpoint)
        counts = {"removed": receipt.removed, "added": receipt.added, "changed": receipt.changed}
        out: dict[str, Any] = {"checkpoint": source.id, **counts, "unchanged": receipt.unchanged}
        if receipt.differences:
            out["differences"] = bounded(
                [f"{shown_path(path)}: {printable(reason)}" for path, reason in receipt.differences], MAX_PATHS
            )
        return out

    async def _read_artifact(self, given: ReadArtifact) -> dict[str, Any]:
        source = await self._find(given.checkpoint)
        reference = source.artifacts.get(given.name)
        if reference is None:
            names = bounded([printable(name) for name in sorted(source.artifacts)], MAX_LISTED)["shown"]
            raise ToolError("NOT_FOUND", "The checkpoint has no artifact of that name.", f"It has: {', '.join(names) or 'none'}.")
        if reference.size > MAX_READABLE:
            raise ToolError("TOO_LARGE", f"The artifact has {reference.size:,} bytes; at most {MAX_READABLE:,} can be read.")
        data = await self._repo.read_artifact(source, given.name)
        out: dict[str, Any] = {"checkpoint": source.id, "name": given.name, "bytes": len(data)}
        clean, records = self._redactor.redact(b"", data)
        records = tuple(sorted((*reference.redactions, *records), key=lambda each: each.offset))
        try:
            data.decode()
        except UnicodeDecodeError:
            part, more = _part(bytes(clean), given.offset)
            return {**out, "base64": base64.b64encode(part).decode(), **more}
        text, more = _part(shown_text(bytes(clean), 0, records), given.offset)
        return {**out, "text": text, **more}

    # ---- parts

    async def _find(self, which: str) -> Checkpoint:
        """The checkpoint of this thread that a model named. `NOT_FOUND` for whatever else."""
        found: Checkpoint | None = None
        if which == "latest":
            found = await self._repo.get(self._thread_id)
        elif _passes(validate_text, which, "A name"):
            found = await self._repo.get(self._thread_id, which) if _passes(validate_id, which) else None
            found = found or await self._repo.get(self._thread_id, label=which)
        if found is None:
            raise _not_found(which)
        return found

    def _options(self, options: Options | None) -> dict[str, Any]:
        own = options() if callable(options) else options
        return {**self._known, **(own or {})}

    def _bound(self, options: Mapping[str, Any], source: Checkpoint) -> dict[str, Any]:
        return {**options, "thread_id": self._thread_id, "checkpoint_id": source.id}


def _told(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a model is told of a checkpoint; no thread, and no place."""
    totals = checkpoint.totals
    out: dict[str, Any] = {
        "id": checkpoint.id,
        "label": None if checkpoint.label is None else printable(checkpoint.label),
        "reason": checkpoint.reason,
        "created_at": checkpoint.created.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "files": totals.files,
        "bytes": totals.bytes,
    }
    if checkpoint.step is not None:
        out["step"] = checkpoint.step
    if checkpoint.artifacts:
        out["artifacts"] = bounded([printable(name) for name in sorted(checkpoint.artifacts)], MAX_ARTIFACTS)["shown"]
    return out


def _not_found(which: str) -> ToolError:
    shown = printable(which)
    shown = shown if len(shown) <= MAX_LABEL else f"{shown[:MAX_LABEL]}..."
    return ToolError("NOT_FOUND", f"This thread has no checkpoint {shown!r}.", "checkpoint_list shows what there is.")


def _passes(check: Callable[..., None], *args: object) -> bool:
    try:
        check(*args)
    except SnapshotError:
        return False
    return True


def _check_name(text: str, what: str) -> None:
    # what is shown of it has to be what it is found by
    if not _passes(validate_text, text, what) or len(text) > MAX_LABEL or text != printable(text).strip():
        raise ToolError(
            "INVALID_ARGUMENTS",
            f"{what} is a text of 1 to {MAX_LABEL} characters without control or invisible characters, or space around it.",
        )


def _artifacts(given: Sequence[Artifact]) -> dict[str, bytes]:
    if len(given) > MAX_ARTIFACTS:
        raise ToolError("INVALID_ARGUMENTS", f"At most {MAX_ARTIFACTS} artifacts are saved at once.")
    found: dict[str, bytes] = {}
    for each in given:
        _check_name(each.name, "The name of an artifact")
        if each.name in found:
            raise ToolError("INVALID_ARGUMENTS", "Two artifacts have the same name.")
        found[each.name] = each.text.encode()
    if sum(map(len, found.values())) > MAX_ARTIFACT_BYTES:
        raise ToolError("TOO_LARGE", f"The artifacts have more than {MAX_ARTIFACT_BYTES:,} bytes.", "Write them to files.")
    return found


def _part(data: Shown, offset: int | None) -> tuple[Shown, dict[str, int]]:
    """What one call shows of an artifact, and where the next goes on."""
    start = offset or 0
    if not 0 <= start <= len(data):
        raise ToolError("INVALID_ARGUMENTS", f"offset is a number from 0 to {len(data):,}.")
    end = start + MAX_READ
    return data[start:end], {"next_offset": end} if end < len(data) else {}
