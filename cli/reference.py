"""docs/commands.md, made from the definitions of the commands: `python -m snapcore.cli.reference >docs/commands.md`."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import typer

from .app import ALIASES, app
from .help import OPTIONS, argument_help, names, option_groups, option_help, paragraphs
from .options import COMMON

__all__ = ["reference"]

HEAD: Final = """# Commands

Every command with all it takes, as `snapcore help COMMAND` shows it. [The command line](cli.md) says how they are used:
addresses, output, JSON, exit codes. This page is made by `make docs`.
"""


def reference() -> str:
    """The page in Markdown."""
    root: Any = typer.main.get_command(app)
    commands = list(_commands(root, typer.Context(root, info_name="snapcore", **root.context_settings)))
    full = max((option_groups(command, ctx).get(COMMON, []) for command, ctx in commands), key=len)
    lines = [HEAD, f"## {COMMON}\n", *_table("option", ((names(option), option_help(option)) for option in full))]
    for command, ctx in commands:
        lines += ["", *_section(command, ctx, [names(option) for option in full])]
    return "\n".join(lines) + "\n"


def _commands(group: Any, ctx: Any) -> Iterator[tuple[Any, Any]]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        own = typer.Context(command, info_name=name, parent=ctx, **command.context_settings)
        if hasattr(command, "list_commands"):
            yield from _commands(command, own)
        else:
            yield command, own


def _section(command: Any, ctx: Any, common: list[str]) -> Iterator[str]:
    path = ctx.command_path
    yield f"## {path}\n"
    yield from (f"{_text(paragraph)}\n" for paragraph in paragraphs(command.help))
    yield f"    {path} {' '.join(command.collect_usage_pieces(ctx))}\n"
    other = [alias for alias, name in ALIASES.items() if f"snapcore {name}" == path]
    if other:
        yield f"Also: {', '.join(f'`snapcore {alias}`' for alias in other)}.\n"
    arguments = [p for p in command.get_params(ctx) if p.param_type_name == "argument" and not p.hidden]
    if arguments:
        yield from (*_table("argument", ((a.display_name_raw, argument_help(a)) for a in arguments)), "")
    groups = option_groups(command, ctx)
    mine = [names(option) for option in groups.pop(COMMON, [])]
    for heading, options in groups.items():
        yield from (*_table("option" if heading == OPTIONS else heading, ((names(o), option_help(o)) for o in options)), "")
    yield (
        "And the [common options](#common-options).\n" if mine == common else f"Also {', '.join(f'`{name}`' for name in mine)}.\n"
    )
    if command.examples:
        yield "\n".join(f"    {line}" for line in "\n".join(command.examples).splitlines())


def _table(head: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"| {head} | |\n|---|---|"
    for name, text in rows:
        yield f"| `{name.replace('|', chr(92) + '|')}` | {_text(text).replace('|', chr(92) + '|')} |"


def _text(text: str) -> str:
    """Text as Markdown that shows it as it is."""
    return "".join(f"\\{each}" if each in "*<`_[" else each for each in text)


if __name__ == "__main__":
    sys.stdout.write(reference())
