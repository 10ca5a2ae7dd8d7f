"""Finding stores and sandboxes by address: built-in schemes by dotted name, others by entry point."""

import importlib
import inspect
import os
import re
from collections.abc import Callable
from typing import Any, Final

from .errors import Code, ProviderError, RepositoryError, SnapshotError, printable

__all__ = ["connect", "load", "open_blobs", "open_database", "split_scheme"]

_SCHEME: Final = re.compile(r"^([a-z][a-z0-9+.-]*)://", re.ASCII | re.IGNORECASE)
_STORES: Final = {
    "file": "snapcore.stores.local:open_local",
    "memory": "snapcore.stores.memory:open_memory",
    "s3": "snapcore.stores.s3:open_s3",
}
_PROVIDERS: Final = {"file": "snapcore.providers.local:connect"}


def split_scheme(address: str) -> tuple[str, str]:
    """(scheme, rest) of an address; a plain path has the scheme `file`. Schemes are told in small letters, however written."""
    match = _SCHEME.match(address)
    return (match[1].lower(), address[match.end() :]) if match else ("file", address)


def _checked(address: str, what: str) -> str:
    if not address or "\0" in address:
        raise SnapshotError(
            f"The address of the {what} is {'empty' if not address else 'not a valid path'}.",
            code=Code.INVALID_REQUEST,
            hint="Name a folder, '.' for the present one.",
        )
    return address


def load(name: str) -> Any:
    """The object behind `module:attribute`. Imported only now, so that unused backends cost nothing."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _find(group: str, builtin: dict[str, str], scheme: str) -> Callable[[str], Any] | None:
    if scheme in builtin:
        found: Callable[[str], Any] = load(builtin[scheme])
        return found
    from importlib.metadata import entry_points

    for point in entry_points(group=group, name=scheme):
        loaded: Callable[[str], Any] = point.load()
        return loaded
    return None


def open_blobs(address: str) -> Any:
    """The blob store at an address. Raises `RepositoryError` `UNKNOWN_SCHEME`."""
    scheme, rest = split_scheme(_checked(address, "repository"))
    kind, colon, _ = address.partition(":")
    if colon and scheme == "file" and kind.lower() in _STORES and not _SCHEME.match(address):
        # taken for a folder, it would keep here what was to go elsewhere
        raise RepositoryError(
            f"An address that begins with {kind}: goes on with //.",
            code=Code.UNKNOWN_SCHEME,
            hint=f"Write {kind.lower()}://..., or ./ before the name of a folder.",
        )
    opener = _find("snapcore.stores", _STORES, scheme)
    if opener is None:
        raise RepositoryError(
            f"No blob store is known for {scheme}://.",
            code=Code.UNKNOWN_SCHEME,
            hint=f"Known: {', '.join(sorted(_STORES))}, and what installed packages add.",
        )
    return opener(os.path.expanduser(rest) if scheme == "file" else f"{scheme}://{rest}")


def open_database(url: str) -> Any:
    """The checkpoint store on a SQL database."""
    return load("snapcore.stores.sql:SqlCheckpointStore")(url)


async def connect(address: str) -> Any:
    """A handle on the sandbox at an address: a folder (`./dir`, `/dir`, `file:///dir`), or what an installed package adds.

    Raises `ProviderError` `UNKNOWN_SCHEME`, or what the provider raises when there is no such sandbox.
    """
    scheme, rest = split_scheme(_checked(address, "sandbox"))
    if _SCHEME.match(address):
        address = f"{scheme}://{rest}"
    opener = _find("snapcore.providers", _PROVIDERS, scheme)
    if opener is None:
        raise ProviderError(
            f"No provider is known for {printable(scheme)}://.",
            code=Code.UNKNOWN_SCHEME,
            hint=f"Known: {', '.join(sorted(_PROVIDERS))}, and what installed packages add.",
        )
    handle = opener(address)
    return await handle if inspect.isawaitable(handle) else handle
