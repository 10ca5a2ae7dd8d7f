"""`snapcore.json`: what a repository pins for good."""

import secrets
from typing import Final

import msgspec

from .chunking import DEFAULT_CHUNKER, ChunkerParams
from .errors import Code, RepositoryError
from .protocols import StoreIdentity

__all__ = ["CONFIG_KEY", "FORMAT_VERSION", "RepositoryConfig", "decode_config", "encode_config", "new_config"]

CONFIG_KEY: Final = "snapcore.json"
FORMAT_VERSION: Final = 1
KNOWN_FEATURES: Final[frozenset[str]] = frozenset()


class RepositoryConfig(msgspec.Struct, frozen=True):
    """Format version, ids (32 hex digits), chunker parameters, and features that a reader must know.

    `salt` (32 hex digits) seasons the fingerprints of secrets; it is no secret itself.
    """

    format_version: int
    repository_id: str
    database_id: str
    salt: str
    chunker: ChunkerParams = DEFAULT_CHUNKER
    required_features: tuple[str, ...] = ()

    @property
    def identity(self) -> StoreIdentity:
        """The ids that the database must carry too."""
        return StoreIdentity(self.repository_id, self.database_id)


def new_config() -> RepositoryConfig:
    """A fresh repository's configuration, with random ids."""
    return RepositoryConfig(FORMAT_VERSION, secrets.token_hex(16), secrets.token_hex(16), secrets.token_hex(16))


def encode_config(config: RepositoryConfig) -> bytes:
    """JSON, indented for people who look."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


def decode_config(data: bytes) -> RepositoryConfig:
    """Parse and check. Raises `RepositoryError` `DAMAGED` or `UNSUPPORTED_FORMAT`."""
    try:
        config = msgspec.json.decode(data, type=RepositoryConfig)
    except msgspec.MsgspecError as error:
        raise RepositoryError(
            f"{CONFIG_KEY} cannot be read: {error}.", code=Code.DAMAGED, hint="Restore that small file from a copy."
        ) from error
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
    return config
