"""Snapshots of the OpenAI Agents SDK's sandbox sessions, kept as checkpoints; see docs/integrations/openai-agents.md.

Importing this module registers the snapshot type `snapcore` with the SDK: a process that reads a session's state back has to.
"""

import io
import os
import urllib.parse
from pathlib import Path
from typing import Final, Literal, Self

from snapcore.errors import Code, RepositoryError, SnapcoreError, SnapshotError

try:
    from agents.sandbox.errors import SnapshotPersistError, SnapshotRestoreError
    from agents.sandbox.session.dependencies import Dependencies, DependenciesError
    from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec
    from pydantic import ConfigDict, field_validator, model_validator
except ImportError as error:
    raise RepositoryError(
        "Snapshots of the OpenAI Agents SDK need the package openai-agents, which is not installed.",
        code=Code.MISSING_EXTRA,
        hint="pip install 'snapcore[openai-agents]'",
    ) from error

from .openai_agents_client import PAYLOAD, SnapshotClient

__all__ = ["PAYLOAD", "SnapcoreSnapshot", "SnapcoreSnapshotSpec", "SnapshotClient"]

SHOWN_PLACE: Final = Path("<snapcore>")


def _checked_address(address: str | None) -> str | None:
    """An address that is the same in every process and may be stored: no credential, no relative path, nothing in memory."""
    if address is None:
        return None
    scheme, separator, _ = address.partition("://")
    if not separator or scheme == "file":
        return os.path.abspath(os.path.expanduser(address.removeprefix("file://")))
    if scheme == "memory":
        raise ValueError("a repository in memory cannot be opened again: bind a SnapshotClient to the session's dependencies")
    if "@" in urllib.parse.urlsplit(address).netloc:
        raise ValueError("the address of a repository holds a login: bind a SnapshotClient to the session's dependencies")
    return address


def _check_place(repository: str | None, client_dependency_key: str | None) -> None:
    if (repository is None) == (client_dependency_key is None):
        raise ValueError("give either repository or client_dependency_key")


class SnapcoreSnapshot(SnapshotBase):
    """A session's snapshot: the newest checkpoint of the thread `id`, and its history.

    Either `repository` is an address without credentials, which is opened for each call, or `client_dependency_key` names a
    `SnapshotClient` among the session's dependencies: for secrets, a file policy, a database, a repository that is open anyway.
    That client is needed then in every process: without it nothing is saved, rather than saved without redaction.
    """

    type: Literal["snapcore"] = "snapcore"  # pyright: ignore[reportIncompatibleVariableOverride]  # as the SDK narrows it too
    repository: str | None = None
    client_dependency_key: str | None = None

    model_config = ConfigDict(hide_input_in_errors=True)  # an address that is refused may hold a login
    _check_repository = field_validator("repository")(_checked_address)

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        _check_place(self.repository, self.client_dependency_key)
        return self

    async def persist(self, data: io.IOBase, *, dependencies: Dependencies | None = None) -> None:
        """Save an archive as the next checkpoint. Raises the SDK's `SnapshotPersistError`, whose cause tells more."""
        try:
            client = await self._client(dependencies)
            await client.upload(self.id, data)
        except (SnapcoreError, DependenciesError, OSError) as error:
            raise SnapshotPersistError(snapshot_id=self.id, path=SHOWN_PLACE, context=_context(error), cause=error) from error

    async def restore(self, *, dependencies: Dependencies | None = None) -> io.IOBase:
        """The newest checkpoint as an archive. Raises the SDK's `SnapshotRestoreError`, whose cause tells more."""
        try:
            client = await self._client(dependencies)
            return await client.download(self.id)
        except (SnapcoreError, DependenciesError, OSError) as error:
            raise SnapshotRestoreError(snapshot_id=self.id, path=SHOWN_PLACE, context=_context(error), cause=error) from error

    async def restorable(self, *, dependencies: Dependencies | None = None) -> bool:
        """Whether there is a checkpoint. Raises what went wrong when that cannot be told: a session that began with an empty
        workspace because a database was out of reach would lose its files at its next stop."""
        return await (await self._client(dependencies)).exists(self.id)

    async def _client(self, dependencies: Dependencies | None) -> SnapshotClient:
        if self.client_dependency_key is None:
            assert self.repository is not None
            return SnapshotClient(self.repository)
        key = self.client_dependency_key
        if dependencies is None:
            raise DependenciesError(f"A snapshot needs session dependencies with a snapcore SnapshotClient as {key!r}.")
        client = await dependencies.require(key, consumer=type(self).__name__)
        if not isinstance(client, SnapshotClient):
            raise SnapshotError(
                f"The dependency {key!r} is a {type(client).__name__} and no SnapshotClient.", code=Code.INVALID_REQUEST
            )
        return client


class SnapcoreSnapshotSpec(SnapshotSpec):
    """What new sessions' snapshots are built from; the fields are those of `SnapcoreSnapshot`."""

    type: Literal["snapcore"] = "snapcore"  # pyright: ignore[reportIncompatibleVariableOverride]  # as the SDK narrows it too
    repository: str | None = None
    client_dependency_key: str | None = None

    model_config = ConfigDict(hide_input_in_errors=True)  # an address that is refused may hold a login
    _check_repository = field_validator("repository")(_checked_address)

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        _check_place(self.repository, self.client_dependency_key)
        return self

    def build(self, snapshot_id: str) -> SnapshotBase:
        """The snapshot of a session."""
        return SnapcoreSnapshot(id=snapshot_id, repository=self.repository, client_dependency_key=self.client_dependency_key)


def _context(error: Exception) -> dict[str, object]:
    return {"code": str(error.code), "reason": str(error)} if isinstance(error, SnapcoreError) else {}
