"""`snapcore diff`."""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from snapcore.addresses import shown_address
from snapcore.errors import Code, SnapshotError

from .contents import Place, split_place
from .diff_output import change_fields, print_names, print_patch, print_skipped, print_stat
from .options import AllowAnyRoot, OptionalThread, SecretCommand, SecretEnv, SecretFile
from .output import path_fields, path_list, print_json, print_line
from .progress import progress
from .runtime import Exit, Invocation, UsageError, command, places, resolve

if TYPE_CHECKING:
    from snapcore.browse import Diff, DiffEntry
    from snapcore.model import Checkpoint
    from snapcore.patchtext import FilePatch
    from snapcore.repository import Repository

__all__ = ["diff"]

EXAMPLES: Final = {
    "diff": (
        "# what the newest checkpoint changed",
        "snapcore diff latest --thread thread-1",
        "snapcore diff label:after-install latest --thread thread-1 --stat",
        "# what a folder holds now, against the newest checkpoint",
        "snapcore diff latest ./workspace --thread thread-1 --patch",
        "snapcore diff latest ./workspace -t thread-1 --paths src --exit-code || echo changed",
    )
}

Patches = Callable[[], "AsyncIterator[FilePatch]"]


@command
async def diff(
    invocation: Invocation,
    *,
    before: Place,
    after: Annotated[
        str | None,
        typer.Argument(
            metavar="CHECKPOINT|SANDBOX",
            help="What to compare it with: another checkpoint, or a sandbox's address, such as a folder written with a slash.",
        ),
    ] = None,
    thread: OptionalThread = None,
    patch: Annotated[bool, typer.Option("--patch", "-p", help="Show changes of text as a unified diff, as git does.")] = False,
    stat: Annotated[bool, typer.Option("--stat", help="Show a table with sizes and numbers of lines.")] = False,
    unified: Annotated[int, typer.Option("--unified", "-U", metavar="N", help="Lines to show around each change.")] = 3,
    paths: Annotated[
        list[str] | None, typer.Option("--paths", metavar="PATH", help="Only this path and what is under it. Repeatable.")
    ] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="End with 1 when something differs, with 2 on failure.")] = False,
    root: Annotated[
        list[str] | None,
        typer.Option("--root", metavar="NAME=DIR", help="Where one of several captured folders is now. Repeatable."),
    ] = None,
    allow_any_root: AllowAnyRoot = False,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    secret_command: SecretCommand = None,
) -> int:
    """Show what differs between two checkpoints, or a checkpoint and a sandbox as it is now.

    With one checkpoint alone, what it changed: it is compared with the one before it in its thread. Of a sandbox only what may
    have changed is read, and nothing is written; what is excluded there counts on neither side.
    """
    from snapcore.sandbox_roots import is_address

    live = root is not None or (after is not None and is_address(after))
    if is_address(before):
        raise UsageError("A sandbox comes after the checkpoint.", hint="snapcore diff CHECKPOINT SANDBOX")
    if unified < 0:
        raise UsageError("--unified takes a number from 0.")
    spec, path = split_place(before)
    other, other_path = split_place(after) if after is not None and not live else (None, path)
    chosen = _paths(paths, path, other_path)
    hidden = invocation.secrets(secret_env, secret_file, secret_command, needed=False) if live else None
    async with invocation.repository() as repo:
        first = await resolve(repo, spec, thread)
        if live:
            address, roots = places(after, root)
            if len(first.roots) > 1 and roots is None:
                names = ", ".join(each.name for each in first.roots)
                raise UsageError(f"The checkpoint holds several folders: {names}.", hint="Say where each is: --root NAME=DIR.")
            with progress(invocation, "compare") as on_progress:
                found = await repo.compare(
                    first,
                    address,
                    roots=roots,
                    paths=chosen,
                    secrets=hidden,
                    allow_any_root=allow_any_root,
                    on_progress=on_progress,
                )

            def patches() -> "AsyncIterator[FilePatch]":
                return repo.patches(found, first, address, roots=roots, secrets=hidden, context=unified)

            ends = {"before": first.id, "after": None, "sandbox": shown_address(address) if roots is None else None}
        else:
            start, end = await _checkpoints(repo, first, other, thread)
            found = await repo.diff(start, end, paths=chosen)

            def patches() -> "AsyncIterator[FilePatch]":
                return repo.patches(found, start, end, context=unified)

            ends = {"before": start.id if start is not None else None, "after": end.id}
        several = len({each.root for each in (*found.added, *found.changed, *found.removed)} | {r.name for r in first.roots}) > 1
        if invocation.json:
            await _print_json(found, ends, several, patches if patch or stat else None, with_text=patch)
        elif invocation.tells:
            if stat:
                await print_stat(patches(), several=several)
            if stat and patch:
                print_line()
            if patch:
                async for each in patches():
                    print_patch(each.data)
            if not stat and not patch:
                print_names(found, several=several, long=invocation.verbose)
        if not invocation.json:
            print_skipped(found.skipped, several=several, aside=patch or invocation.quiet)
    if exit_code and found:
        return Exit.FAILED
    return Exit.WARNINGS if found.skipped else Exit.DONE


def _paths(paths: list[str] | None, first: bytes, second: bytes) -> Sequence[str | bytes] | None:
    named = {first, second}
    if len(named) > 1:
        raise UsageError("Both checkpoints need the same path.", hint="Leave the paths away, and give --paths PATH.")
    if not any(named):
        return paths
    if paths:
        raise UsageError("CHECKPOINT:PATH and --paths exclude each other.")
    return [first]


async def _checkpoints(
    repo: "Repository", first: "Checkpoint", other: str | None, thread: str | None
) -> tuple["Checkpoint | None", "Checkpoint"]:
    """The earlier and the later one."""
    if other is None:
        return await repo.previous(first), first
    try:
        return first, await resolve(repo, other, thread)
    except SnapshotError as error:
        if error.code is not Code.MISSING_CHECKPOINT or not os.path.isdir(other):
            raise
        raise SnapshotError(error.message, code=error.code, hint=f"If the folder is meant, write ./{other}.") from None


async def _print_json(found: "Diff", ends: dict[str, Any], several: bool, patches: "Patches | None", *, with_text: bool) -> None:
    fields: dict[str, Any] = {"message_type": "diff", **ends}
    parts = {name: _names(getattr(found, name), several) for name in ("added", "changed", "removed")}
    fields.update({name: path_list(paths) for name, paths in parts.items()})
    inexact = [path_fields(path) for paths in parts.values() for path in paths]
    fields["inexact"] = [each for each in inexact if "path_b64" in each]
    if patches is None:
        fields["entries"] = [change_fields(each) for each in (*found.removed, *found.added, *found.changed)]
    else:
        fields["entries"] = [change_fields(each.entry, each, with_text=with_text) async for each in patches()]
    fields["skipped"] = [{"root": each.root, **path_fields(each.path), "reason": each.reason} for each in found.skipped]
    print_json(fields)


def _names(entries: "Sequence[DiffEntry]", several: bool) -> list[bytes]:
    return [f"{each.root}:".encode("utf-8", "surrogateescape") + each.path if several else each.path for each in entries]
