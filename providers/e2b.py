"""Sandboxes of E2B, through its own client: `e2b://sandbox-id`, or `e2b://sandbox-id/folder` for another root than /workspace."""

import os
import re
import secrets
import shlex
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from snapcore.addresses import HIDDEN
from snapcore.errors import Code, ProviderError, SnapshotError, printable
from snapcore.sandboxes import (
    Abilities,
    Binding,
    Hook,
    SandboxHandle,
    SandboxSpec,
    check_environment,
    check_path,
    refuse_options,
    run_hooks,
)

from .e2b_errors import e2b_module, retried
from .e2b_handle import ABILITIES, E2BSandbox
from .e2b_shell import E2BConnection
from .threads import uncancelled

__all__ = ["DEFAULT_ROOT", "E2BProvider", "connect"]

DEFAULT_ROOT: Final = "/workspace"
_ID: Final = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
_FIELDS: Final = ("image", "name", "snapshot", "user", "environment", "labels", "timeout", "options")
_OPTIONS: Final = frozenset({"allow_internet_access", "iam", "lifecycle", "mcp", "network", "volume_mounts"})

T = TypeVar("T")

Network = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""E2B's network rules, or a function that makes them: it is asked anew each time a sandbox is made or opened."""


class E2BProvider:
    """See `SandboxProvider`. An image is a template (default: E2B's own `base`), labels are metadata.

    `timeout` is in seconds: a sandbox ends, or is paused with `on_timeout="pause"`, that long after it was made or opened last.
    `network` is set on each sandbox that is made and again on each that is opened, so that a token in it is known to E2B's proxy
    only. `user` is who commands run as (default: the template's user). The key and the addresses are E2B_API_KEY, E2B_DOMAIN and
    so on unless given.
    """

    def __init__(
        self,
        *,
        template: str | None = None,
        timeout: float = 3600.0,
        on_timeout: Literal["kill", "pause"] = "kill",
        network: Network | None = None,
        user: str | None = None,
        api_key: str | None = None,
        domain: str | None = None,
        api_url: str | None = None,
        sandbox_url: str | None = None,
        on_create: Sequence[Hook] = (),
        on_open: Sequence[Hook] = (),
    ) -> None:
        if on_timeout not in ("kill", "pause"):
            raise SnapshotError("on_timeout is either 'kill' or 'pause'.", code=Code.INVALID_REQUEST)
        self._template = template
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._network = network
        self._user = user
        self._options = {"api_key": api_key, "domain": domain, "api_url": api_url, "sandbox_url": sandbox_url}
        self._on_create = tuple(on_create)
        self._on_open = tuple(on_open)

    def __repr__(self) -> str:
        return f"E2BProvider(template={self._template!r})"

    @property
    def name(self) -> str:
        """`e2b`"""
        return "e2b"

    @property
    def abilities(self) -> Abilities:
        """See `SandboxProvider`."""
        return ABILITIES

    async def create(self, spec: SandboxSpec) -> E2BSandbox:
        """See `SandboxProvider.create`. `spec.options` may hold `lifecycle`, `network`, `iam`, `volume_mounts`, `mcp` and
        `allow_internet_access`, as E2B's client takes them. The workspace root is made if it is missing."""
        _check(spec)
        api = e2b_module().AsyncSandbox
        rules = self._rules()
        given: dict[str, Any] = {
            "template": spec.snapshot or spec.image or self._template,
            "timeout": _seconds(spec.timeout if spec.timeout is not None else self._timeout),
            "metadata": dict(spec.labels) | ({"name": spec.name} if spec.name else {}),
            "envs": dict(spec.environment),
            "lifecycle": {"on_timeout": self._on_timeout},
            "network": rules,
            "idempotency_key": secrets.token_hex(16),  # an answer that was lost: asking again finds the same sandbox
            **spec.options,
        }
        sandbox = await self._call(lambda: api.create(**given, **self._options), "that is to be made", rules, spec.environment)
        user = spec.user or self._user
        binding = Binding("e2b", str(sandbox.sandbox_id), check_path(spec.workspace_root), {"user": user} if user else {})
        handle = self._handle(sandbox, binding, rules, spec.environment)
        steps = (_make_root, *self._on_create, *self._on_open)
        await run_hooks(steps, handle, lambda: uncancelled(self._undo(handle)))
        return handle

    async def open(self, binding: Binding) -> E2BSandbox:
        """See `SandboxProvider.open`. The time that is left is made longer, never shorter, to `timeout`."""
        sandbox_id = _checked_id(binding)
        api = e2b_module().AsyncSandbox
        rules = self._rules()
        sandbox = await self._call(
            lambda: api.connect(sandbox_id, timeout=_seconds(self._timeout), **self._options), sandbox_id, rules
        )
        handle = self._handle(sandbox, binding, rules, {})

        async def set_rules(opened: SandboxHandle) -> None:
            if rules is not None:
                await self._call(lambda: sandbox.update_network(rules), sandbox_id, rules)

        await run_hooks((set_rules, *self._on_open), handle, handle.close)
        return handle

    async def pause(self, handle: SandboxHandle) -> None:
        """See `SandboxProvider.pause`. Memory is kept too. A sandbox that is paused already is no error."""
        sandbox = _own(handle).live()
        await self._call(sandbox.pause, handle.binding.sandbox_id)
        await handle.close()

    async def snapshot(self, handle: SandboxHandle) -> str:
        """See `SandboxProvider.snapshot`. The sandbox stands still meanwhile."""
        sandbox = _own(handle).live()
        return str((await self._call(sandbox.create_snapshot, handle.binding.sandbox_id, again=False)).snapshot_id)

    async def destroy(self, binding: Binding) -> None:
        """See `SandboxProvider.destroy`. Its snapshots stay."""
        sandbox_id = _checked_id(binding)
        api = e2b_module().AsyncSandbox
        await self._call(lambda: api.kill(sandbox_id, **self._options), sandbox_id)

    # ---- parts

    def _rules(self) -> dict[str, Any] | None:
        rules = self._network() if callable(self._network) else self._network
        return None if rules is None else dict(rules)

    def _handle(
        self, sandbox: Any, binding: Binding, rules: Mapping[str, Any] | None, environment: Mapping[str, str]
    ) -> E2BSandbox:
        hidden = self._hidden(rules, environment, sandbox)
        return E2BSandbox(E2BConnection(sandbox, binding.details.get("user") or self._user, hidden), binding)

    async def _call(
        self,
        work: Callable[[], Awaitable[T]],
        sandbox_id: str,
        rules: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        again: bool = True,
    ) -> T:
        return await retried(work, sandbox_id, self._hidden(rules, environment or {}), attempts=4 if again else 1)

    def _hidden(self, rules: Mapping[str, Any] | None, environment: Mapping[str, str], sandbox: Any = None) -> tuple[str, ...]:
        """All that no error may show, longest first."""
        found = {self._options["api_key"] or "", os.environ.get("E2B_API_KEY", ""), *environment.values(), *_texts(rules or {})}
        if sandbox is not None:
            found |= {getattr(sandbox, "_envd_access_token", None) or "", getattr(sandbox, "traffic_access_token", None) or ""}
        return tuple(sorted((text for text in found if len(text) >= 6), key=len, reverse=True))

    async def _undo(self, handle: E2BSandbox) -> None:
        try:
            await self.destroy(handle.binding)
        finally:
            await handle.close()


async def connect(address: str) -> E2BSandbox:
    """The sandbox at `e2b://sandbox-id[/root]`; a paused one is resumed."""
    rest = address.removeprefix("e2b://")
    sandbox_id, slash, root = rest.partition("/")
    path = os.fsdecode(urllib.parse.unquote_to_bytes(root))
    return await E2BProvider().open(Binding("e2b", sandbox_id, check_path(f"/{path}") if slash and path else DEFAULT_ROOT))


def _check(spec: SandboxSpec) -> None:
    """Refuse what cannot be done before anything is touched."""
    refuse_options(spec, "E2B", *_FIELDS)  # processors and memory are the template's
    check_environment(spec.environment)
    if unknown := spec.options.keys() - _OPTIONS:
        raise ProviderError(
            f"E2B's provider has no option {printable(min(unknown))!r}.",
            code=Code.NOT_CAPABLE,
            hint=f"Known: {', '.join(sorted(_OPTIONS))}.",
        )
    check_path(spec.workspace_root)


def _checked_id(binding: Binding) -> str:
    """Ids go into the paths of requests as they are."""
    if binding.provider != "e2b" or not _ID.fullmatch(binding.sandbox_id):
        shown = HIDDEN if "@" in binding.sandbox_id else printable(binding.sandbox_id[:80])  # it could be a credential
        raise ProviderError(f"'{shown}' is not the id of an E2B sandbox.", code=Code.NO_SANDBOX)
    return binding.sandbox_id


def _own(handle: SandboxHandle) -> E2BConnection:
    if not isinstance(handle, E2BSandbox):
        raise ProviderError("This is not a handle of an E2B sandbox.", code=Code.NOT_CAPABLE)
    return handle.connection


def _seconds(timeout: float) -> int:
    return max(1, round(timeout))


def _texts(value: Any) -> list[str]:
    """All texts in nested values; keys are host names and the like."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for part in value.values() for text in _texts(part)]
    if isinstance(value, (list, tuple)):
        return [text for part in value for text in _texts(part)]
    return []


async def _make_root(handle: SandboxHandle) -> None:
    """Make the workspace root, belonging to the handle's user; the root user makes it where that one may not."""
    connection, root = _own(handle), shlex.quote(handle.workspace_root)
    made = await retried(
        lambda: connection.run(f"mkdir -p -- {root} 2>/dev/null; [ -d {root} ] && exit 0; id -u; exit 9"),
        connection.id,
        connection.hidden,
    )
    owner = made.stdout.strip().decode()
    if made.exit_code == 9 and owner.isdigit():
        made = await retried(
            lambda: connection.run(f"mkdir -p -- {root} && chown {owner} {root}", user="root"), connection.id, connection.hidden
        )
    if made.exit_code:
        raise ProviderError(
            f"The workspace root {printable(handle.workspace_root)} cannot be made in the E2B sandbox.",
            code=Code.NOT_CAPABLE,
            hint="Name a folder that the sandbox's user may write to.",
        )
