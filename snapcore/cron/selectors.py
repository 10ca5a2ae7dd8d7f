"""Selectors: one text for any number of sandboxes, looked up again at each run.

`docker:label=KEY[=VALUE]` are the running containers with that label. `folders:PATTERN` are the folders that a pattern of the
shell matches: `*`, `?` and `[...]` within a name, no `**`; a leading dot has to be written. Links are not followed behind the
first wildcard: whoever may write into one of the folders could lead the capture to somebody else's.
"""

import asyncio
import contextlib
import fnmatch
import os
import urllib.parse
from dataclasses import dataclass
from typing import Final

from snapcore.addresses import shown_address
from snapcore.errors import Code, ProviderError, SnapshotError, printable

from .threads import apart

__all__ = ["Found", "Selector", "list_sandboxes", "parse_selector"]

LOOK_SECONDS: Final = 60.0
_WILD: Final = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Selector:
    """`kind` is `docker` or `folders`; `what` the label, or the absolute pattern."""

    kind: str
    what: str


@dataclass(frozen=True, slots=True)
class Found:
    """One sandbox: its name, and its address. On the way from the folder `below` to it no link is followed."""

    name: str
    address: str
    below: str | None = None


def parse_selector(text: str, folder: str, what: str) -> Selector:
    """The selector of a job; a pattern is relative to `folder`. `what` begins the message of an error. Raises `SnapshotError`
    `INVALID_REQUEST`."""
    kind, _, rest = text.partition(":")
    if kind == "docker":
        key, equals, label = rest.partition("=")
        if key == "label" and equals and label.partition("=")[0] and label.isprintable():
            return Selector(kind, label)
    elif kind == "folders" and rest and "\0" not in rest:
        pattern = os.path.normpath(os.path.join(folder, os.path.expanduser(rest)))
        if "**" in pattern:
            raise SnapshotError(
                f"{what} holds **, which would match folders within each other.",
                code=Code.INVALID_REQUEST,
                hint="Write one * for each level.",
            )
        return Selector(kind, pattern)
    raise SnapshotError(
        f"{what} is {printable(shown_address(text))!r}, which selects nothing that there is.",
        code=Code.INVALID_REQUEST,
        hint="Write docker:label=KEY, docker:label=KEY=VALUE or folders:PATTERN.",
    )


async def list_sandboxes(selector: Selector) -> list[Found]:
    """What a selector stands for now, by name.

    Raises `ProviderError` when the engine cannot be reached or the disk does not answer, `SnapshotError` `MISSING_WORKSPACE` or
    `UNREADABLE_ENTRY` when the folder before the first wildcard is not there or cannot be listed: it may be a disk that is not
    mounted.
    """
    if selector.kind == "docker":
        return await _containers(selector.what)
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            return await apart(_folders, selector.what)
    except TimeoutError:
        raise ProviderError(
            f"The folders were not listed within {LOOK_SECONDS:g} seconds.",
            code=Code.EXEC_TIMEOUT,
            hint="Does their disk answer?",
            retryable=True,
        ) from None


async def _containers(label: str) -> list[Found]:
    from snapcore.providers.docker_client import DockerEngine

    engine = DockerEngine()
    try:
        await engine.open()
        api = engine.api
        listed = await engine.run(lambda: api.containers(filters={"label": label, "status": "running"}))
    finally:
        await engine.close()
    names = []
    for each in listed:
        own = [name[1:] for name in each.get("Names") or () if name.count("/") == 1]  # the others are links of old
        names.append(own[0] if own else str(each["Id"]))
    return [Found(name, f"docker://{urllib.parse.quote(name)}") for name in sorted(names)]


def _folders(pattern: str) -> list[Found]:
    parts = pattern.strip("/").split("/")
    fixed = next((number for number, part in enumerate(parts) if _WILD & set(part)), len(parts) - 1)
    top = "/" + "/".join(parts[:fixed])
    try:
        with os.scandir(top):
            pass
    except OSError as error:
        gone = isinstance(error, FileNotFoundError | NotADirectoryError)
        raise SnapshotError(
            f"The folder {printable(top)} {'is not there' if gone else 'cannot be listed'}: {error.strerror}.",
            code=Code.MISSING_WORKSPACE if gone else Code.UNREADABLE_ENTRY,
            hint="Is its disk mounted, and may this user read it?",
        ) from None
    found = [top]
    for part in parts[fixed:]:
        found = [path for folder in found for path in _inside(folder, part)]
    return sorted((Found(os.path.relpath(path, top), path, top) for path in found), key=lambda each: each.name)


def _inside(folder: str, part: str) -> list[str]:
    """The folders in `folder` whose names match; none where it cannot be listed."""
    out = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            hidden = entry.name.startswith(".") and not part.startswith(".")
            if not hidden and fnmatch.fnmatchcase(entry.name, part) and entry.is_dir(follow_symlinks=False):
                out.append(entry.path)
    return out
