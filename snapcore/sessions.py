"""What a repository does with sessions: the part of `Repository` that works in sandboxes and keeps the ledger."""

import os
from typing import TYPE_CHECKING, Any

from .engine import Engine, finish
from .errors import Code, ProviderError
from .registry import make_provider

if TYPE_CHECKING:
    from typing import Unpack

    from .ledger import Event, Output
    from .sandboxes import SandboxProvider
    from .session import Session
    from .session_options import SessionArguments

__all__ = ["Sessions"]


class Sessions:
    """See `Repository`."""

    _engine: Engine

    def __init__(self) -> None:
        self._providers: dict[str, SandboxProvider] = {}
        self._own_providers: list[Any] = []  # those that nobody else closes

    async def session(self, provider: "SandboxProvider", *, thread_id: str, **options: "Unpack[SessionArguments]") -> "Session":
        """Work in the thread's sandbox: opened again when the thread has one, else a new one by `provider`.

        A session records what is done in its sandbox; see `Session`. Only the newest session of a thread can go on with it: an
        earlier one is told by `CheckpointWriterLostError`, and leaves ledger, checkpoints and sandbox alone from then on.

        `spec` says what a new sandbox is made from. `roots` are the folders to capture, by name (the workspace root), `policy` is
        which files: by default also the trees that a tool could rebuild. `secrets`, `hooks`, `patterns` and `allow_short_secrets`
        are redacted in all that is stored, as by `capture`. `on_create` is called with each new sandbox, `on_open` with each that
        is made or opened, after the provider's own hooks. `auto` captures by itself. `wait` is how many seconds to wait for
        another writer. `allow_any_root` permits `/` and home folders.

        With `replay="strict"` a program that starts again gets what its operations came to, one after another, and only what was
        not done yet is done; another operation than the recorded one raises `ReplayDivergedError`. `"live"` goes on live
        from there instead; `"off"`, the default, replays nothing. `rerun_uncertain` permits that operations of which nobody knows
        whether they were done are done again, unless they were marked `at_most_once`.

        Raises `ProviderError` `NO_SANDBOX` when the thread has checkpoints and no sandbox: `resume` makes one.
        """
        from .session_opening import open_session
        from .session_options import session_options

        chosen = session_options(**options)
        self._providers[provider.name] = provider
        return await open_session(self, provider, thread_id, chosen)

    async def resume(
        self,
        thread_or_sandbox_id: str,
        *,
        label: str | None = None,
        checkpoint_id: str | None = None,
        provider: "SandboxProvider | None" = None,
        **options: "Unpack[SessionArguments]",
    ) -> "Session":
        """Work in a new sandbox that a checkpoint of the thread is restored into: the newest, the newest with `label`, or
        `checkpoint_id`. `Session.restored` says what came back.

        The options are those of `session`; `replay` is `"strict"` by default: what had been done before that checkpoint is not
        done again. `provider` is by default the one that this object used last under the recorded name, else the built-in one of
        that name; `spec` is by default the recorded one, whose environment has to be given again. `reinject` puts the present
        values of `secrets` back into the files that they were taken out of.

        Raises `SnapshotError` `MISSING_CHECKPOINT`, and what `restore` and the provider raise; the new sandbox is destroyed then.
        """
        from .session_opening import resume_session
        from .session_options import session_options

        options.setdefault("replay", "strict")
        chosen = session_options(**options)
        if provider is not None:
            self._providers[provider.name] = provider
        return await resume_session(self, thread_or_sandbox_id, label, checkpoint_id, provider, chosen)

    async def attach(
        self,
        sandbox: Any = None,
        *,
        thread_id: str,
        take_over: bool = False,
        **options: "Unpack[SessionArguments]",
    ) -> "Session":
        """Work by hand in a sandbox that is there already: an address, a handle, which is closed with the session, or the
        thread's own sandbox when none is named.

        What is done is recorded in the thread's ledger, as by any session. But it is no part of what a program replays, counts
        as no step, and what was begun and not ended makes nothing uncertain. Neither can the session make, pause or destroy a
        sandbox. The options are those of `session`, without those that replay or make one.

        A thread whose ledger has another sandbox is refused (`SnapshotError` `INVALID_REQUEST`). So is one that a session has
        opened and not closed (`CheckpointWriterConflictError`), unless `take_over` says that its process is gone: it can go on
        no more then. Raises `ProviderError` `NO_SANDBOX` when none is named and the ledger has none.
        """
        from .registry import connect
        from .session_attaching import attach_session, sandbox_of
        from .session_options import session_options

        chosen = session_options(**options)
        if sandbox is not None and not isinstance(sandbox, str | os.PathLike):
            return await attach_session(self, sandbox, thread_id, chosen, take_over=take_over)
        handle = await sandbox_of(self, thread_id) if sandbox is None else await connect(os.fspath(sandbox))
        try:
            return await attach_session(self, handle, thread_id, chosen, take_over=take_over)
        except BaseException:
            await finish(handle.close())
            raise

    async def events(self, thread_id: str, *, after: int = 0, limit: int = 500) -> "list[Event]":
        """Up to `limit` events of the thread's ledger with a number above `after`, in order."""
        return await self._engine.checkpoints.events(thread_id, after=after, limit=limit)

    async def read_output(self, output: "Output") -> bytes:
        """The bytes of an output in an event. Raises `SnapshotError` `MISSING_BLOB` or `INVALID_BLOB`."""
        from .outputs import read_output

        return await read_output(self._engine, output)

    def _provider(self, name: str | None) -> "SandboxProvider":
        """The provider used last under a name, or the built-in one."""
        if name is None:
            raise ProviderError(
                "The ledger has no sandbox of this thread.", code=Code.NO_SANDBOX, hint="Say where to make one: provider=..."
            )
        if name not in self._providers:
            made = make_provider(name)
            self._providers[name] = made
            self._own_providers.append(made)
        return self._providers[name]

    async def _close_providers(self) -> None:
        while self._own_providers:
            close = getattr(self._own_providers.pop(), "close", None)
            if close is not None:
                await finish(close())
