"""What checkpoints hold: `ls`, `cat`, `diff`."""

import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .options import At, OptionalThread
from .output import entry_fields, mode_text, path_fields, path_list, path_text, print_json, print_json_array, print_line
from .runtime import Exit, Invocation, UsageError, command, resolve

if TYPE_CHECKING:
    from snapcore.browse import DiffEntry
    from snapcore.model import Entry

__all__ = ["cat", "diff", "ls"]

EXAMPLES: Final = {
    "ls": (
        "snapcore ls latest --thread thread-1",
        "snapcore ls label:after-install:src --thread thread-1",
        "snapcore ls 3f2a -v",
    ),
    "cat": ("snapcore cat latest:src/main.py --thread thread-1", "snapcore cat 3f2a:notes.txt | head -n 1"),
    "diff": ("snapcore diff label:after-install latest --thread thread-1",),
}

Place = Annotated[str, typer.Argument(metavar="CHECKPOINT[:PATH]", help="A checkpoint, and a path in it.")]
Root = Annotated[str | None, typer.Option("--root", metavar="NAME", help="Which root, when there are several.")]


def split_place(place: str) -> tuple[str, bytes]:
    """`ID:PATH`, `latest:PATH`, `label:L:PATH` as checkpoint and path; the path is empty when there is none."""
    prefix, rest = ("label:", place[6:]) if place.startswith("label:") else ("", place)
    spec, _, path = rest.partition(":")
    return prefix + spec, path.strip("/").encode("utf-8", "surrogateescape")


@command
async def ls(
    invocation: Invocation,
    *,
    place: Place,
    thread: OptionalThread = None,
    root: Root = None,
    flat: Annotated[bool, typer.Option("--flat", help="Only what is directly in the folder.")] = False,
) -> int:
    """List what a checkpoint holds, all of it or under a path."""
    spec, path = split_place(place)
    async with invocation.repository() as repo:
        checkpoint = await resolve(repo, spec, thread)
        entries = repo.ls(checkpoint, path, recursive=not flat, root=root)
        if invocation.json:
            await print_json_array(_as_json(entries))
        else:
            async for entry in entries:
                print_line(_line(entry, long=invocation.verbose))
    return Exit.DONE


async def _as_json(entries: "AsyncIterator[Entry]") -> AsyncIterator[object]:
    async for entry in entries:
        yield entry_fields(entry)


def _line(entry: "Entry", *, long: bool) -> str:
    path = path_text(entry.path)
    if not long:
        return path
    target = f" -> {path_fields(entry.target)['path']}" if entry.target else ""
    return f"{mode_text(entry.kind, entry.mode)} {entry.size:>12,} {path}{target}"


@command
async def cat(invocation: Invocation, *, place: Place, thread: OptionalThread = None, root: Root = None) -> int:
    """Write a file's bytes to stdout, as they are."""
    spec, path = split_place(place)
    if not path:
        raise UsageError("There is no path.", hint="Name the file as CHECKPOINT:PATH.")
    async with invocation.repository() as repo:
        checkpoint = await resolve(repo, spec, thread)
        async for piece in repo.open_file(checkpoint, path, root=root):
            sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
    return Exit.DONE


@command
async def diff(
    invocation: Invocation,
    *,
    before: At,
    after: At,
    thread: OptionalThread = None,
) -> int:
    """Say which paths were added, changed and removed between two checkpoints."""
    async with invocation.repository() as repo:
        first = await resolve(repo, before, thread)
        second = await resolve(repo, after, thread)
        found = await repo.diff(first, second)
    several = len({root.name for each in (first, second) for root in each.roots}) > 1
    parts = {name: _paths(getattr(found, name), several) for name in ("added", "changed", "removed")}
    if invocation.json:
        fields: dict[str, Any] = {"message_type": "diff", "before": first.id, "after": second.id}
        fields.update({name: path_list(paths) for name, paths in parts.items()})
        inexact = [path_fields(path) for paths in parts.values() for path in paths]
        fields["inexact"] = [each for each in inexact if "path_b64" in each]
        print_json(fields)
    elif invocation.tells:
        for name, sign in (("removed", "-"), ("added", "+"), ("changed", "~")):
            for path in parts[name]:
                print_line(f"{sign} {path_text(path)}")
    return Exit.DONE


def _paths(entries: "Sequence[DiffEntry]", several: bool) -> list[bytes]:
    return [f"{each.root}:".encode() + each.path if several else each.path for each in entries]
