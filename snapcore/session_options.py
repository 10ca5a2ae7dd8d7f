"""How a thread is worked on, as callers say it and as sessions use it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Unpack

from .capturing import DEFAULT_ROOT, RootRequest
from .errors import Code, SnapcoreError, SnapshotError
from .redaction import Redactor
from .redaction_hooks import RedactionHook, RedactionPattern
from .sandboxes import Hook, SandboxHandle, SandboxSpec
from .selection import FilePolicy

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Automatic", "ReplayMode", "SessionArguments", "SessionOptions", "root_requests", "scrubbed", "session_options"]

ReplayMode = Literal["strict", "live", "off"]


class Automatic(Protocol):
    """What decides when a session is captured by itself. It reports failures and never raises one."""

    async def started(self, session: "Session") -> None:
        """The session is open."""
        ...

    async def stepped(self, session: "Session") -> None:
        """An affecting operation has ended. Called while the session does nothing else: `Session._checkpoint_locked`."""
        ...

    async def ended(self, session: "Session") -> None:
        """The session is about to be closed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a thread is worked on; see `Repository.session` for each."""

    redactor: Redactor
    spec: SandboxSpec | None = None
    roots: Mapping[str, str] | None = None
    policy: FilePolicy | None = None
    on_create: Sequence[Hook] = ()
    on_open: Sequence[Hook] = ()
    auto: Automatic | None = None
    replay: ReplayMode = "off"
    rerun_uncertain: bool = False
    wait: float | None = None
    reinject: bool = False
    allow_any_root: bool = False

    @property
    def files(self) -> FilePolicy:
        """The policy in force: by default with the trees that a tool can rebuild, since a replayed install has to be there."""
        return self.policy if self.policy is not None else FilePolicy.default().with_rebuildable()


class SessionArguments(TypedDict, total=False):
    """What `Repository.session` and `Repository.resume` take besides the thread and the provider."""

    spec: SandboxSpec | None
    roots: Mapping[str, str] | None
    policy: FilePolicy | None
    secrets: Mapping[str, str | bytes] | Sequence[str | bytes] | None
    hooks: Sequence[RedactionHook]
    patterns: Sequence[RedactionPattern]
    allow_short_secrets: bool
    on_create: Sequence[Hook]
    on_open: Sequence[Hook]
    auto: Automatic | None
    replay: ReplayMode
    rerun_uncertain: bool
    wait: float | None
    reinject: bool
    allow_any_root: bool


def session_options(**given: Unpack[SessionArguments]) -> SessionOptions:
    """The options that arguments amount to. Raises `SnapshotError` `INVALID_REQUEST`."""
    fields: dict[str, Any] = dict(given)
    redactor = Redactor.build(
        fields.pop("secrets", None),
        hooks=fields.pop("hooks", ()),
        patterns=fields.pop("patterns", ()),
        allow_short=fields.pop("allow_short_secrets", False),
    )
    options = SessionOptions(redactor=redactor, **fields)
    if options.replay not in ("strict", "live", "off"):
        raise SnapshotError("replay is 'strict', 'live' or 'off'.", code=Code.INVALID_REQUEST)
    return options


@contextlib.contextmanager
def scrubbed(redactor: Redactor) -> Iterator[None]:
    """Errors leave the block without secrets."""
    try:
        yield
    except SnapcoreError as error:
        redactor.scrub_error(error)
        raise


def root_requests(handle: SandboxHandle, policy: FilePolicy, roots: Mapping[str, str]) -> list[RootRequest]:
    """What a session captures: the workspace root, or the declared folders by name."""
    if not roots:
        return [RootRequest(DEFAULT_ROOT, handle.workspace(), policy)]
    return [RootRequest(name, handle.workspace(path), policy) for name, path in roots.items()]
