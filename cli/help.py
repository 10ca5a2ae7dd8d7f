"""How help pages are laid out: usage, description, arguments, options by group, environment, exit codes, examples.

Loaded when a page is asked for, and by the generator of docs/commands.md.
"""

import inspect
from collections.abc import Iterator
from typing import Any, Final

from .options import COMMON

__all__ = ["option_groups", "paragraphs", "write_command", "write_group"]

OPTIONS: Final = "Options"
# Exit code -> meaning, as far as every command has it; docs/cli.md says more.
EXIT_CODES: Final = {
    "0": "done",
    "1": "failed, or problems were found",
    "2": "wrong usage",
    "3": "done, with warnings",
    "10": "there is no repository",
    "11": "another writer holds the thread",
    "130": "interrupted (SIGINT)",
    "141": "whoever read the output went away",
    "143": "terminated (SIGTERM)",
}
POINTER: Final = "'snapcore --help' lists the exit codes."


def paragraphs(text: str | None) -> list[str]:
    """The paragraphs of a docstring, each in one line."""
    return [" ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n")]


def option_groups(command: Any, ctx: Any) -> dict[str, list[Any]]:
    """A command's visible options by the heading of their group, the common ones last."""
    groups: dict[str, list[Any]] = {OPTIONS: []}
    for param in command.get_params(ctx):
        if param.param_type_name == "option" and not param.hidden:
            heading = COMMON if param.name == "help" else param.rich_help_panel or OPTIONS
            groups.setdefault(heading, []).append(param)
    groups[COMMON] = groups.pop(COMMON, [])
    return {heading: options for heading, options in groups.items() if options}


def write_command(command: Any, ctx: Any, formatter: Any) -> None:
    """The help page of a command."""
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    arguments = [param.get_help_record(ctx) for param in command.get_params(ctx) if param.param_type_name == "argument"]
    if any(arguments):
        with formatter.section("Arguments"):
            formatter.write_dl([record for record in arguments if record])
    for heading, options in option_groups(command, ctx).items():
        with formatter.section(heading):
            formatter.write_dl([option.get_help_record(ctx) for option in options])
    _write_examples(command.examples, formatter)
    formatter.write_paragraph()
    formatter.write_text(POINTER)


def _write_examples(examples: tuple[str, ...], formatter: Any) -> None:
    if examples:
        with formatter.section("Examples"):
            for example in examples:
                for line in example.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def write_group(group: Any, ctx: Any, formatter: Any) -> None:
    """The help page of a group of commands; that of the whole command also tells the environment and the exit codes."""
    group.format_usage(ctx, formatter)
    group.format_help_text(ctx, formatter)
    with formatter.section("Commands"):
        formatter.write_dl(list(_summaries(group, ctx)))
    for heading, options in option_groups(group, ctx).items():
        with formatter.section(OPTIONS if heading == COMMON else heading):
            formatter.write_dl([option.get_help_record(ctx) for option in options])
    if ctx.parent is None:
        with formatter.section("Exit codes"):
            formatter.write_dl(list(EXIT_CODES.items()))


def _summaries(group: Any, ctx: Any) -> Iterator[tuple[str, str]]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        yield name, paragraphs(command.help)[0]
