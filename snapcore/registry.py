"""Finding stores and sandboxes by address: built-in schemes by dotted name, others by entry point."""

import importlib
import inspect
import os
import re
from collections.abc import Callable
from typing import Any, Final

from .errors import Code, ProviderError, RepositoryError, SnapshotError, printable
from .sandboxes import Binding

__all__ = ["connect", "load", "make_provider", "open_binding", "open_blobs", "open_database", "split_scheme"]

_SCHEME: Final = re.compile(r"^([a-z][a-z0-9+.-]*)://", re.ASCII | re.IGNORECASE)
_STORES: Final = {
    "file": "snapcore.stores.local:open_local",
    "memory": "snapcore.stores.memory:open_memory",
    "s3": "snapcore.stores.s3:open_s3",
}
_PROVIDERS: Final = {
    "docker": "snapcore.providers.docker:connect",
    "e2b": "snapcore.providers.e2b:connect",
    "exec": "snapcore.providers.exec:connect",
    "file": "snapcore.providers.local:connect",
    "ssh": "snapcore.providers.exec:connect",
}
_MAKERS: Final = {
    "docker": "snapcore.providers.docker:DockerProvider",
    "e2b": "snapcore.providers.e2b:E2BProvider",
    "file": "snapcore.providers.local:LocalProvider",
}
_COMMAND: Final = "exec:"  # what follows is a command and no place, so it has no slashes


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
    if (address == "~" or address.startswith("~/")) and os.path.expanduser(address) == address:
        # taken for a folder called ~, what is kept there would be found only from where it was made
        raise SnapshotError(
            f"The address of the {what} begins at the home folder, and this user has none.",
            code=Code.INVALID_REQUEST,
            hint="Set HOME, or name a folder that begins with / or ./ instead.",
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
    if address.startswith(_COMMAND):  # a folder of that name would have the command's secrets in it
        raise RepositoryError(
            "An exec: address leads to a sandbox: no repository is there.",
            code=Code.UNKNOWN_SCHEME,
            hint="Write ./ before the name of a folder.",
        )
    opener = _find("snapcore.stores", _STORES, scheme)
    if opener is None:
        known = f"Known: {', '.join(sorted(_STORES))}, and what installed packages add."
        database = scheme.partition("+")[0] in ("postgres", "postgresql", "sqlite")
        raise RepositoryError(
            f"No blob store is known for {scheme}://.",
            code=Code.UNKNOWN_SCHEME,
            hint=f"A database goes beside it, by --database. {known}" if database else known,
        )
    return opener(f"{scheme}://{rest}" if _SCHEME.match(address) else rest)


def open_database(url: str) -> Any:
    """The checkpoint store on a SQL database."""
    return load("snapcore.stores.sql:SqlCheckpointStore")(url)


async def connect(address: str) -> Any:
    """A handle on the sandbox at an address.

    | address | sandbox |
    |---|---|
    | `./dir`, `/dir`, `~/dir`, `file:///dir` | a folder of this host |
    | `docker://container[/folder]` | a Docker container |
    | `e2b://sandbox-id[/folder]` | a sandbox of E2B |
    | `ssh://[user@]host[:port][/folder]` | what OpenSSH's client leads to |
    | `exec:command words /folder` | what a command of this host leads to: `exec:kubectl exec -i pod -- /workspace` |

    and what installed packages add, by entry points of the group `snapcore.providers`, each a function that takes an address and
    returns a handle or a coroutine of one. An `exec:` address runs a command here: take none from somebody you do not trust.

    Raises `ProviderError` `UNKNOWN_SCHEME`, `SnapshotError` `INVALID_REQUEST` for an address that makes no sense, or what the
    provider raises when there is no such sandbox.
    """
    _checked(address, "sandbox")
    scheme, rest = ("exec", "") if address.startswith(_COMMAND) else split_scheme(address)
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


def make_provider(name: str) -> Any:
    """The built-in provider of that name, with its defaults. Raises `ProviderError` `UNKNOWN_SCHEME`."""
    if name not in _MAKERS:
        raise ProviderError(
            f"snapcore has no provider called {printable(name)}.",
            code=Code.UNKNOWN_SCHEME,
            hint="Pass the one that the sandbox was made with: provider=...",
        )
    return load(_MAKERS[name])()


async def open_binding(binding: Binding, provider: Callable[[str], Any] = make_provider) -> Any:
    """A handle on the sandbox that a binding tells of, wherever it came from; `provider` gives those that have to be asked."""
    address = binding.details.get("address") if binding.provider in ("exec", "ssh") else None
    if binding.provider == "file":
        address = binding.workspace_root
    return await (connect(address) if address else provider(binding.provider).open(binding))
