"""What checkpoints hold: `ls` and `cat`."""

import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from snapcore.errors import printable

from .options import OptionalThread
from .output import count, entry_fields, mode_text, path_fields, path_text, print_json_array, print_line, size
from .runtime import Exit, Invocation, UsageError, command, resolve

if TYPE_CHECKING:
    from snapcore.model import Entry

__all__ = ["cat", "ls", "split_place"]

EXAMPLES: Final = {
    "ls": (
        "snapcore ls latest --thread thread-1",
        "snapcore ls label:after-install:src --thread thread-1 --flat",
        "snapcore ls 3f2a --long",
        "snapcore ls latest:src --tree --thread thread-1",
    ),
    "cat": ("snapcore cat latest:src/main.py --thread thread-1", "snapcore cat 3f2a:notes.txt | head -n 1"),
}
BRANCHES: Final = ("├── ", "└── ", "│   ", "    ")
PLAIN_BRANCHES: Final = ("|-- ", "`-- ", "|   ", "    ")
SECOND: Final = 1_000_000_000  # in nanoseconds

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
    long: Annotated[bool, typer.Option("--long", "-l", help="With mode, size, time in UTC and link targets.")] = False,
    human: Annotated[bool, typer.Option("--human", "-H", help="Sizes such as 1.2 MB in what --long shows.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Draw a tree.")] = False,
) -> int:
    """List what a checkpoint holds, all of it or under a path."""
    if flat and tree:
        raise UsageError("--flat and --tree exclude each other.")
    spec, path = split_place(place)
    long = long or human or invocation.verbose
    async with invocation.repository() as repo:
        checkpoint = await resolve(repo, spec, thread)
        if invocation.json:
            await print_json_array(_as_json(repo.ls(checkpoint, path, recursive=not flat, root=root)))
        elif tree and invocation.tells:
            await _draw(repo.tree(checkpoint, path, root=root), path, long=long, human=human)
        else:
            async for entry in repo.ls(checkpoint, path, recursive=not flat, root=root):
                if invocation.tells:
                    print_line(_details(entry, human=human) + _text(entry, long=True) if long else path_text(entry.path))
    return Exit.DONE


async def _as_json(entries: "AsyncIterator[Entry]") -> AsyncIterator[object]:
    async for entry in entries:
        yield entry_fields(entry)


def _details(entry: "Entry", *, human: bool) -> str:
    """Mode, size and time, as wide for each entry."""
    import datetime

    bytes_ = size(entry.size) if human else str(entry.size)
    when = datetime.datetime.fromtimestamp(entry.mtime_ns // SECOND, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{mode_text(entry.kind, entry.mode)} {bytes_:>{10 if human else 13}} {when} "


def _text(entry: "Entry", *, long: bool, name: str | None = None) -> str:
    """A path, or its `name`, and where a link leads; when `long`, also of which file this is another name."""
    text = name if name is not None else path_text(entry.path)
    if entry.target or entry.in_root:
        text += f" -> {path_fields(entry.target)['path'] if not entry.in_root else _in_root(entry)}"
    if long and entry.hardlink:
        text += f" == {path_text(entry.hardlink)}"
    return text


def _in_root(entry: "Entry") -> str:
    return f"ROOT/{path_fields(entry.target)['path']}" if entry.target else "ROOT"


async def _draw(entries: "AsyncIterator[tuple[Entry, bool]]", top: bytes, *, long: bool, human: bool) -> None:
    """A tree as `tree` draws it, line by line, and how much there is."""
    from snapcore.model import Kind

    more, last, line, space = _branches()
    above: list[str] = []  # what is drawn for each folder above, outermost first
    folders = files = 0
    depth_of_top = _depth(top)
    async for entry, is_last in entries:
        details = f"[{_details(entry, human=human).rstrip()}]  " if long else ""
        if entry.path == top:
            sys.stdout.write(f"{details}{printable(_text(entry, long=long))}\n")
        else:
            del above[_depth(entry.path) - depth_of_top - 1 :]
            name = path_text(entry.path.rpartition(b"/")[2])
            drawn = printable(_text(entry, long=long, name=name))
            sys.stdout.write(f"{''.join(above)}{last if is_last else more}{details}{drawn}\n")
            above.append(space if is_last else line)
        folders += entry.kind == Kind.DIR and entry.path != top
        files += entry.kind != Kind.DIR
    print_line()
    print_line(f"{count(folders, 'folder')}, {count(files, 'file')}")


def _depth(path: bytes) -> int:
    return path.count(b"/") + 1 if path else 0


def _branches() -> tuple[str, str, str, str]:
    try:
        "".join(BRANCHES).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN_BRANCHES
    return BRANCHES


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
