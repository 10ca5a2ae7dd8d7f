"""Sandboxes of any provider as resources of Rebuno executions, with their checkpoints in a repository.

    workspace = await rebuno.resource(
        "workspace", driver=SandboxDriver(repo, DockerProvider(), spec=spec), checkpoints=rebuno.CheckpointPolicy(every_steps=5)
    )

The kernel keeps a binding (how to find the sandbox again) and references of checkpoints. A reference names a checkpoint of the
repository and no sandbox, so that an execution that was forked may go on in another kind of sandbox.

Each sandbox has a thread of its own, `rebuno/EXECUTION/KEY`, after the execution that made it. A sandbox that starts from a
checkpoint has a thread that was forked from that checkpoint.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypedDict, Unpack

import msgspec

from snapcore.engine import finish
from snapcore.errors import (
    CheckpointConflictError,
    CheckpointWriterConflictError,
    Code,
    ProviderError,
    SnapshotError,
    printable,
)
from snapcore.model import Checkpoint, validate_text
from snapcore.redaction_hooks import RedactionHook, RedactionPattern
from snapcore.repository import Repository, Roots, Secrets
from snapcore.sandboxes import (
    Binding,
    Hook,
    SandboxHandle,
    SandboxProvider,
    SandboxSpec,
    run_hooks,
)
from snapcore.selection import FilePolicy

from .rebuno_sandbox import RebunoSandbox

try:
    from rebuno import CheckpointUnavailable, execution
except ImportError as error:
    raise ProviderError(
        "The package rebuno is not installed.", code=Code.MISSING_EXTRA, hint="Install it: pip install 'snapcore[rebuno]'."
    ) from error

__all__ = ["DriverOptions", "RebunoSandbox", "SandboxDriver", "thread_of"]

WAIT: Final = 150.0  # seconds; the lease of a worker that died on another machine ends before
GRACE: Final = 30.0  # seconds that a cancelled creation has to come to its end
_REFERENCE: Final = "snapcore/1"
_GONE: Final = (Code.MISSING_CHECKPOINT, Code.MISSING_BLOB, Code.INVALID_BLOB)


class DriverOptions(TypedDict, total=False):
    """What every driver takes; see `SandboxDriver`."""

    key: str
    spec: SandboxSpec | Callable[[str], SandboxSpec]
    policy: FilePolicy | None
    secrets: Secrets
    hooks: Sequence[RedactionHook]
    patterns: Sequence[RedactionPattern]
    allow_short_secrets: bool
    reinject: bool
    roots: Roots | None
    allow_any_root: bool
    wait: float
    coverage_reuse: bool
    configuration: Mapping[str, Any] | None
    on_create: Sequence[Hook]
    on_open: Sequence[Hook]


class _Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A binding as the kernel keeps it."""

    format: int
    thread_id: str
    provider: str
    sandbox_id: str
    workspace_root: str
    details: dict[str, str] = {}

    def binding(self) -> Binding:
        return Binding(self.provider, self.sandbox_id, self.workspace_root, self.details)


class SandboxDriver:
    """A driver for `rebuno.resource`: sandboxes of `provider`, made by `spec`, with checkpoints in `repo`. That has to stay open
    as long as the agent runs: the last checkpoint of an execution is taken after the agent's function has returned.

    `spec` may be a function of the thread's id, for names and labels. `key` is the resource's, for the ids of threads. `policy`,
    `secrets`, `hooks`, `patterns`, `allow_short_secrets`, `roots`, `allow_any_root` and `wait` are those of `Repository.capture`,
    but that what tools can rebuild (`node_modules`, `.venv`) is kept by default: a replayed installation has to be there.
    `reinject` puts the present values of secrets back where a sandbox starts from a checkpoint. `coverage_reuse` says that only
    declared tools and steps change the sandbox. `configuration` is what the kernel compares at each registration: JSON, equal for
    all workers, without credentials. It does not say which provider it is, so that a fork may use another. `on_create` hooks run
    in a sandbox that was made and filled, `on_open` hooks after them and at each later open; the provider's own run before its
    files are there.
    """

    driver_id = "snapcore.sandbox.v1"

    def __init__(self, repo: Repository, provider: SandboxProvider, **options: Unpack[DriverOptions]) -> None:
        self._repo = repo
        self._provider = provider
        self._options = options
        self._key = options.get("key", "workspace")
        validate_text(self._key, "A resource's key", code=Code.INVALID_REQUEST)
        self._policy = options.get("policy") or FilePolicy.with_rebuildable()
        self._configuration = _json_object(options.get("configuration") or {})
        self.coverage_reuse = options.get("coverage_reuse", False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._provider.name!r}, key={self._key!r})"

    @property
    def configuration(self) -> dict[str, Any]:
        """See the class."""
        return dict(self._configuration)

    # ---- what the package calls

    async def create(self, checkpoint_ref: str | None = None) -> tuple[RebunoSandbox, dict[str, Any]]:
        """A new sandbox with the files of a checkpoint, or as the provider makes it; and its binding.

        Raises `CheckpointUnavailable` when the checkpoint, or what it is made of, is gone. Whatever is raised, also when the
        caller is cancelled, the sandbox is destroyed again.
        """
        execution_id = execution().id
        thread_id = thread_of(execution_id, self._key)
        source = await self._source(checkpoint_ref) if checkpoint_ref else None
        handle = await self._made(thread_id)
        sandbox = self._sandbox(handle, thread_id)

        async def fill(_: SandboxHandle) -> None:
            if source is not None:
                await self._restore(handle, source)
                await self._fork(source, thread_id)
            await self.prepare(sandbox, execution_id=execution_id, restored=source is not None)

        steps = (fill, *self._options.get("on_create", ()), *self._options.get("on_open", ()))
        await run_hooks(steps, sandbox, lambda: finish(self._discard(handle)))
        return sandbox, _recorded(handle.binding, thread_id)

    async def open(self, binding: Any) -> RebunoSandbox:
        """The sandbox that a binding names; a paused one is resumed. Raises `ProviderError` `NO_SANDBOX` when it is gone, or not
        of this driver's provider."""
        recorded = _read_binding(binding)
        if recorded.provider != self._provider.name:
            raise ProviderError(
                f"The execution's sandbox is of {printable(recorded.provider)}, and this driver's are of {self._provider.name}.",
                code=Code.NO_SANDBOX,
                hint="An execution stays in its sandbox. Fork it to go on in another kind.",
            )
        handle = await self._provider.open(recorded.binding())
        sandbox = self._sandbox(handle, recorded.thread_id)
        await run_hooks(self._options.get("on_open", ()), sandbox, handle.close)
        return sandbox

    async def checkpoint(self, handle: RebunoSandbox) -> str:
        """Capture the sandbox as the next checkpoint of its thread; its reference. Repeated without a change in between, the same
        reference is returned. A paused sandbox is paused again."""
        return await handle.on_its_loop(self._capture(handle))

    # ---- beyond it

    async def destroy(self, binding: Any) -> None:
        """End the sandbox that a binding (of a `resource.bound` event) names; its checkpoints stay. The package never does."""
        await self._provider.destroy(_read_binding(binding).binding())

    async def prepare(self, sandbox: RebunoSandbox, *, execution_id: str, restored: bool) -> None:
        """For subclasses: called in `create`, once the files of the checkpoint are there if there is one."""

    # ---- parts

    def _sandbox(self, handle: SandboxHandle, thread_id: str) -> RebunoSandbox:
        return RebunoSandbox(self._provider, handle, thread_id)

    def _secrets(self) -> Secrets:
        return self._options.get("secrets")

    def _redaction(self) -> dict[str, Any]:
        return {
            "secrets": self._secrets(),
            "hooks": self._options.get("hooks", ()),
            "patterns": self._options.get("patterns", ()),
            "allow_short_secrets": self._options.get("allow_short_secrets", False),
            "allow_any_root": self._options.get("allow_any_root", False),
        }

    async def _capture(self, sandbox: RebunoSandbox) -> str:
        async with sandbox.awake() as handle:
            checkpoint = await self._repo.capture(
                handle,
                thread_id=sandbox.thread_id,
                policy=self._policy,
                roots=self._options.get("roots"),
                run_id=execution().id,
                skip_unchanged=True,
                wait=self._options.get("wait", WAIT),
                **self._redaction(),
            )
        return f"{_REFERENCE}/{checkpoint.id}/{checkpoint.thread_id}"

    async def _source(self, reference: str) -> Checkpoint:
        checkpoint_id, _, thread_id = reference.removeprefix(f"{_REFERENCE}/").partition("/")
        if not reference.startswith(f"{_REFERENCE}/") or not thread_id:
            raise CheckpointUnavailable(f"{printable(reference)} is no reference of snapcore's driver.")
        found = await self._repo.get(thread_id, checkpoint_id)
        if found is None:
            raise CheckpointUnavailable(f"The repository has no checkpoint {printable(checkpoint_id)} any more.")
        return found

    async def _restore(self, handle: SandboxHandle, source: Checkpoint) -> None:
        roots = self._options.get("roots")
        saved = all(root.policy.portable for root in source.roots)
        try:
            await self._repo.restore(
                handle,
                thread_id=source.thread_id,
                checkpoint_id=source.id,
                policy=None if saved else self._policy,
                roots=None if roots is None else {name: _place(place) for name, place in roots.items()},
                reinject=self._options.get("reinject", False),
                allow_empty=True,
                **self._redaction(),
            )
        except SnapshotError as error:
            if error.code not in _GONE:
                raise
            raise CheckpointUnavailable(str(error)) from error

    async def _fork(self, source: Checkpoint, thread_id: str) -> None:
        """Start the thread with a copy of the source, which stays when that one's thread is forgotten. An earlier attempt at this
        execution may have done so, or another be at it; the files are here either way."""
        try:
            await self._repo.fork(source.thread_id, source.id, to_thread_id=thread_id)
        except (CheckpointConflictError, CheckpointWriterConflictError):
            return
        except SnapshotError as error:
            if error.code != Code.MISSING_CHECKPOINT:  # deleted since it was restored
                raise

    async def _made(self, thread_id: str) -> SandboxHandle:
        """A new sandbox. When the caller is cancelled it is waited for some time, since only what is known can be destroyed; a
        creation that takes longer than that, by its hooks, is cancelled and undoes itself."""
        spec = self._options.get("spec", SandboxSpec())
        task = asyncio.ensure_future(self._provider.create(spec(thread_id) if callable(spec) else spec))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await finish(self._abandon(task))
            raise

    async def _abandon(self, task: asyncio.Future[SandboxHandle]) -> None:
        await asyncio.wait([task], timeout=GRACE)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await self._discard(task.result())

    async def _discard(self, handle: SandboxHandle) -> None:
        try:
            await self._provider.destroy(handle.binding)
        finally:
            await handle.close()


def thread_of(execution_id: str, key: str = "workspace") -> str:
    """The thread of the sandbox that an execution made for a resource. A later turn of a session goes on in the sandbox of the
    turn before, and so in its thread."""
    return f"rebuno/{execution_id}/{key}"


def _recorded(binding: Binding, thread_id: str) -> dict[str, Any]:
    recorded = _Recorded(1, thread_id, binding.provider, binding.sandbox_id, binding.workspace_root, binding.details)
    found: dict[str, Any] = msgspec.to_builtins(recorded)
    return found


def _read_binding(binding: Any) -> _Recorded:
    try:
        recorded = msgspec.convert(binding, _Recorded)
    except msgspec.ValidationError as error:
        raise SnapshotError(f"This is no binding of snapcore's driver: {error}.", code=Code.INVALID_REQUEST) from None
    if recorded.format != 1:
        raise SnapshotError(
            f"The binding has format {recorded.format}, which this version does not know.",
            code=Code.INVALID_REQUEST,
            hint="Use the version of snapcore that made it.",
        )
    return recorded


def _json_object(value: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError):
        raise SnapshotError("The configuration of a driver must be JSON.", code=Code.INVALID_REQUEST) from None
    return found


def _place(root: str | tuple[str, FilePolicy]) -> str:
    return root[0] if isinstance(root, tuple) else root
