"""`snapcore help`, and how help pages are laid out: usage, description, arguments, options by group, examples.

Loaded when a page is asked for, and by the generator of docs/commands.md.
"""

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from .app import Group
from .options import COMMON

__all__ = [
    "EXAMPLES",
    "argument_help",
    "help_",
    "names",
    "option_groups",
    "option_help",
    "paragraphs",
    "summary",
    "write_command",
    "write_group",
]

EXAMPLES: Final = {"help": ("snapcore help capture", "snapcore help store test")}

OPTIONS: Final = "Options"
OTHERS: Final = "Other commands"
# Heading -> commands, on the page of the whole command. A command that is in none is among the others.
HEADINGS: Final = {
    "Checkpoints": ("init", "capture", "restore", "list", "show", "label", "fork", "rewind", "delete", "threads"),
    "What they hold": ("ls", "cat", "diff", "export", "import"),
    "Sandboxes and agents": ("exec", "log", "mcp"),
    "Upkeep": ("forget", "gc", "verify", "repair", "stats", "store", "cron", "config"),
}
# Heading -> options by their long names, wherever a command has them. The others come first, those of each command last.
PANELS: Final = {
    "What is saved": ("--include", "--exclude", "--everything", "--with-git", "--keep-rebuildable", "--cross-mounts"),
    "Rules": (
        *(f"--keep-{period}" for period in ("last", "hourly", "daily", "weekly", "monthly", "yearly")),
        *("--keep-within", "--keep-label", "--forget-labeled"),
    ),
    "Refusals and limits": (
        *("--on-unsupported", "--on-unreadable", "--on-torn", "--on-limit"),
        *("--max-files", "--max-file-bytes", "--max-total-bytes", "--max-unpacked-bytes"),
    ),
    "Secrets": ("--secret-env", "--secret-file", "--secret-command", "--reinject"),
    "What is noted": ("--label", "--run-id", "--step", "--idempotency-key", "--id"),
    "Other writers": ("--wait", "--skip-locked"),
}
ADDRESSES: Final = {
    "DIR": "A folder of this machine.",
    "docker://CONTAINER/FOLDER": "A Docker container.",
    "e2b://SANDBOX-ID/FOLDER": "A sandbox of E2B.",
    "ssh://USER@HOST/FOLDER": "A host behind ssh.",
    "'exec:COMMAND /FOLDER'": "What a command leads to that runs sh there, such as kubectl exec.",
}
CHECKPOINTS: Final = {
    "latest": "The thread's newest.",
    "label:L": "The newest of the thread that has this label.",
    "ID": "An id, or the start of one, as lists show it.",
}
EXIT_CODES: Final = {
    "0": "done",
    "1": "failed; or problems were found",
    "2": "wrong usage",
    "3": "done, with warnings",
    "10": "there is no repository",
    "11": "another writer holds the thread",
    "130": "interrupted (SIGINT)",
    "141": "whoever read the output went away",
    "143": "terminated (SIGTERM)",
}
# What is read besides the variables that stand for options.
ENVIRONMENT: Final = {
    "NO_COLOR": "No colours, when it is not empty.",
    "TERM": "Where it is 'dumb', nothing is drawn.",
    "TMPDIR": "Where temporary files go.",
}
POINTER: Final = "Addresses, exit codes and environment variables: snapcore --help"
VALUES: Final = {int: "N", float: "NUMBER"}


def help_(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", help="The command, in one or two words.")] = None,
) -> None:
    """Show the help page of a command, or of all."""
    ctx: Any = context.find_root()
    for word in words or ():
        ctx = _named(ctx, word)
    typer.echo(ctx.get_help())


def _named(ctx: Any, word: str) -> Any:
    """The context of the command of that name below `ctx`; the one of a group has commands."""
    if not isinstance(ctx.command, Group):
        return ctx.fail(f"No such command {word!r}.")
    found = ctx.command.get_command(ctx, word)
    if found is None:
        return ctx.command.resolve_command(ctx, [word])  # raises, and says what may have been meant
    return typer.Context(found, info_name=word, parent=ctx, **found.context_settings)


def paragraphs(text: str | None) -> list[str]:
    """The paragraphs of a docstring, each in one line."""
    return [" ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n")]


def summary(command: Any) -> str:
    """The first sentence of what is said of a command."""
    return paragraphs(command.help)[0].partition(". ")[0].rstrip(".") + "."


def option_groups(command: Any, ctx: Any) -> dict[str, list[Any]]:
    """A command's visible options by the heading of their group, the common ones last."""
    groups: dict[str, list[Any]] = {heading: [] for heading in (OPTIONS, *PANELS, COMMON)}
    for param in command.get_params(ctx):
        if param.param_type_name == "option" and not param.hidden:
            groups[_heading(param)].append(param)
    return {heading: options for heading, options in groups.items() if options}


def _heading(option: Any) -> str:
    if option.name == "help" or option.rich_help_panel == COMMON:
        return COMMON
    long_name = max(option.opts, key=len)
    return next((heading for heading, members in PANELS.items() if long_name in members), OPTIONS)


def names(option: Any) -> str:
    """An option as it is written: its names, short ones first, and what stands for its value."""
    given = ", ".join(sorted(option.opts, key=lambda name: name.startswith("--")))
    for name in option.secondary_opts:
        positive = name.replace("--no-", "--", 1)
        given = given.replace(positive, positive.replace("--", "--[no-]", 1)) if positive in option.opts else f"{given} / {name}"
    return given if option.is_flag else f"{given} {_value(option)}"


def _value(option: Any) -> str:
    annotation: Any = getattr(option.type_descriptor, "annotation", None)
    return str(option.metavar or VALUES.get(getattr(annotation, "__args__", (annotation,))[0], "TEXT"))


def option_help(option: Any) -> str:
    """What an option does, with what goes for it when it is not given."""
    notes = ["required"] if option.required else []
    if option.envvar:
        notes.append(f"${option.envvar}")
    if option.default is not None and not option.is_flag:
        notes.append(f"default: {option.default}")
    told = str(option.help or "")
    return f"{told} [{'; '.join(notes)}]" if notes else told


def argument_help(argument: Any) -> str:
    """What an argument is, with what goes for it when it is not given."""
    told = str(argument.help or "")
    return told if argument.required or argument.default is None else f"{told} [default: {argument.default}]"


def write_command(command: Any, ctx: Any, formatter: Any) -> None:
    """The help page of a command."""
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    arguments = [param for param in command.get_params(ctx) if param.param_type_name == "argument" and not param.hidden]
    if arguments:
        with formatter.section("Arguments"):
            formatter.write_dl([(argument.display_name_raw, argument_help(argument)) for argument in arguments])
    _write_options(command, ctx, formatter)
    if command.examples:
        with formatter.section("Examples"):
            for example in command.examples:
                for line in folded(example, formatter.width - formatter.current_indent).splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
    formatter.write_paragraph()
    formatter.write_text(POINTER)


def folded(example: str, width: int) -> str:
    """A line for a shell, in several before options where it is too long."""
    if len(example) <= width or "\n" in example:
        return example
    if example.startswith("#"):
        return textwrap.fill(example, width, subsequent_indent="# ")
    lines = [""]
    for part in re.split(" (?=-)", example):
        if lines[-1] and len(lines[-1]) + len(part) + 3 > width:
            lines.append(f"    {part}")
        else:
            lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    return " \\\n".join(lines)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    groups = option_groups(command, ctx)
    if len(groups) == 1:
        groups = {OPTIONS: next(iter(groups.values()))}
    for heading, options in groups.items():
        with formatter.section(heading):
            formatter.write_dl([(names(option), option_help(option)) for option in options])


def write_group(group: Any, ctx: Any, formatter: Any) -> None:
    """The help page of a group of commands; that of the whole command also tells the environment and the exit codes."""
    group.format_usage(ctx, formatter)
    group.format_help_text(ctx, formatter)
    commands = {name: group.get_command(ctx, name) for name in group.list_commands(ctx)}
    width = max(map(len, commands))
    for heading, members in _headings(list(commands), whole=ctx.parent is None):
        with formatter.section(heading):
            formatter.write_dl([(name.ljust(width), summary(commands[name])) for name in members])
    with formatter.section(OPTIONS):
        options = [option for each in option_groups(group, ctx).values() for option in each]
        formatter.write_dl([(names(option), option_help(option)) for option in options])
    if ctx.parent is None:
        with formatter.section("Addresses, where a folder can be named"):
            formatter.write_dl(list(ADDRESSES.items()))
        with formatter.section("Which checkpoint"):
            formatter.write_dl(list(CHECKPOINTS.items()))
        with formatter.section("Environment"):
            formatter.write_dl([*_variables(commands, ctx), *ENVIRONMENT.items()])
        with formatter.section("Exit codes"):
            formatter.write_dl(list(EXIT_CODES.items()))


def _headings(commands: list[str], *, whole: bool) -> Iterator[tuple[str, list[str]]]:
    if not whole:
        yield "Commands", commands
        return
    placed = {name for members in HEADINGS.values() for name in members}
    for heading, members in (*HEADINGS.items(), (OTHERS, [name for name in commands if name not in placed])):
        yield heading, [name for name in members if name in commands]


def _variables(commands: dict[str, Any], ctx: Any) -> Iterator[tuple[str, str]]:
    """The environment variables that stand for options, each once."""
    seen: set[str] = set()
    for command in commands.values():
        for param in command.get_params(ctx):
            if param.param_type_name == "option" and param.envvar and param.envvar not in seen:
                seen.add(param.envvar)
                yield param.envvar, f"In the place of {max(param.opts, key=len)}."
