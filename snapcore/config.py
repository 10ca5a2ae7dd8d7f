"""`snapcore.json`: what a repository pins for good."""

import re
import secrets
from typing import Final

import msgspec

from .chunking import DEFAULT_CHUNKER, ChunkerParams
from .errors import Code, RepositoryError, SnapshotError, printable
from .protocols import BlobStore, StoreIdentity

__all__ = [
    "CONFIG_KEY",
    "CREATING_KEY",
    "FORMAT_VERSION",
    "REBUILDING_KEY",
    "RENAMING_KEY",
    "RepositoryConfig",
    "decode_config",
    "encode_config",
    "new_config",
    "read_config",
    "without_config",
]

CONFIG_KEY: Final = "snapcore.json"
CREATING_KEY: Final = "snapcore-creating.json"  # the same, until the database has its ids too
REBUILDING_KEY: Final = "snapcore-rebuilding.json"  # what it will be, once the database is rebuilt
RENAMING_KEY: Final = "snapcore-renaming.json"  # what it will be, once the database has its new id
FORMAT_VERSION: Final = 1
_HEX_ID: Final = re.compile("[0-9a-f]{32}")
KNOWN_FEATURES: Final[frozenset[str]] = frozenset()


class RepositoryConfig(msgspec.Struct, frozen=True):
    """Format version, ids (32 hex digits), chunker parameters, and features that a reader must know.

    `salt` (32 hex digits) seasons the fingerprints of secrets; it is no secret itself. No field has a default: a damaged
    name must not pass for an absent one.
    """

    format_version: int
    repository_id: str
    database_id: str
    salt: str
    chunker: ChunkerParams
    required_features: tuple[str, ...]

    @property
    def identity(self) -> StoreIdentity:
        """The ids that the database must carry too."""
        return StoreIdentity(self.repository_id, self.database_id)


def new_config() -> RepositoryConfig:
    """A fresh repository's configuration, with random ids."""
    repository_id, database_id, salt = (secrets.token_hex(16) for _ in range(3))
    return RepositoryConfig(FORMAT_VERSION, repository_id, database_id, salt, DEFAULT_CHUNKER, ())


def encode_config(config: RepositoryConfig) -> bytes:
    """JSON, indented for people who look."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


def decode_config(data: bytes) -> RepositoryConfig:
    """Parse and check. Raises `RepositoryError` `DAMAGED` or `UNSUPPORTED_FORMAT`."""
    try:
        config = msgspec.json.decode(data, type=RepositoryConfig)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damaged(str(error)) from error
    unknown = set(config.required_features) - KNOWN_FEATURES
    if config.format_version != FORMAT_VERSION or unknown:
        raise RepositoryError(
            f"This repository has format version {config.format_version}"
            + (f" and needs {', '.join(sorted(unknown))}" if unknown else "")
            + f"; this snapcore reads version {FORMAT_VERSION}.",
            code=Code.UNSUPPORTED_FORMAT,
            hint="Use a newer snapcore.",
        )
    config.chunker.validate()
    if not all(_HEX_ID.fullmatch(i) for i in (config.repository_id, config.database_id, config.salt)):
        raise _damaged("an id is not 32 hex digits")
    return config


async def read_config(blobs: BlobStore, key: str = CONFIG_KEY) -> RepositoryConfig | None:
    """The configuration under a key, None when there is none. Raises as `decode_config` does, and what the store raises."""
    try:
        return decode_config(await blobs.get(key))
    except SnapshotError as error:
        if error.code != Code.MISSING_BLOB:
            raise
        return None


def _damaged(what: str) -> RepositoryError:
    return RepositoryError(
        f"{CONFIG_KEY} cannot be read: {what}.", code=Code.DAMAGED, hint="Restore that small file from a copy."
    )


async def without_config(blobs: BlobStore, url: str) -> RepositoryError:
    """Why there is no `snapcore.json` at `url`: no repository, one whose creation was cut short (both `NO_REPOSITORY`), or one
    that has lost that file (`DAMAGED`)."""
    if await blobs.head(CREATING_KEY) is not None:
        return RepositoryError(
            f"The creation of the repository at {printable(url)} was cut short.",
            code=Code.NO_REPOSITORY,
            hint=f"'snapcore init --repo {_argument(url)}' goes on with it.",
        )
    async for _ in blobs.list("packs/"):
        return RepositoryError(
            f"The repository at {printable(url)} has packs and no {CONFIG_KEY}.",
            code=Code.DAMAGED,
            hint="Put that small file back from a copy: it holds how files are cut and what secrets are fingerprinted with,"
            " which nothing else tells.",
        )
    return RepositoryError(
        f"There is no repository at {printable(url)}.",
        code=Code.NO_REPOSITORY,
        hint=f"Create one with 'snapcore init --repo {_argument(url)}'.",
    )


def _argument(url: str) -> str:
    """A URL as a shell takes it: `?` and `&` mean something there."""
    import shlex

    shown = printable(url)
    return shown if shlex.quote(shown) == shown else f'"{shown}"'
