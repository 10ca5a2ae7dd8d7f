"""The parameters that several commands share, each described once."""

from typing import Annotated, Final

import typer

__all__ = [
    "COMMON",
    "AllowAnyRoot",
    "At",
    "Config",
    "Database",
    "Debug",
    "DryRun",
    "Everything",
    "Exclude",
    "Include",
    "Json",
    "KeepRebuildable",
    "Label",
    "NoConfig",
    "OnUnsupported",
    "OptionalThread",
    "Progress",
    "Quiet",
    "Repo",
    "SecretCommand",
    "SecretEnv",
    "SecretFile",
    "Spec",
    "Thread",
    "Verbose",
    "Wait",
    "WithGit",
]

COMMON: Final = "Common options"  # the group, last in each help page, of what every command takes

Repo = Annotated[
    str | None,
    typer.Option(
        "--repo",
        "-r",
        envvar="SNAPCORE_REPO",
        metavar="URL",
        help="The repository: a folder or an address; else ~/.snapcore.",
        rich_help_panel=COMMON,
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar="SNAPCORE_DATABASE",
        metavar="URL",
        help="The repository's database, when it is not the one in its folder.",
        rich_help_panel=COMMON,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        envvar="SNAPCORE_CONFIG",
        metavar="FILE",
        help="The settings file; else the nearest snapcore.toml, or pyproject.toml with [tool.snapcore], here or above.",
        rich_help_panel=COMMON,
    ),
]
NoConfig = Annotated[bool, typer.Option("--no-config", help="Take no settings file.", rich_help_panel=COMMON)]
Progress = Annotated[
    str | None,
    typer.Option(
        "--progress",
        envvar="SNAPCORE_PROGRESS",
        metavar="auto|plain|none",
        help="How progress is told on stderr: drawn on a terminal and nowhere else, as plain lines, or not at all.",
        rich_help_panel=COMMON,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=COMMON)]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress; no result unless it was asked for as JSON.", rich_help_panel=COMMON),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.", rich_help_panel=COMMON)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=COMMON)]
AllowAnyRoot = Annotated[bool, typer.Option("--allow-any-root", help="Even / or a home folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would be done, and do nothing.")]

# A parameter `thread` that is required here is not on the command line, where the settings name a thread; see `runtime.command`.
Thread = Annotated[
    str, typer.Option("--thread", "-t", envvar="SNAPCORE_THREAD", metavar="THREAD", help="The thread; else that of the settings.")
]
OptionalThread = Annotated[
    str | None,
    typer.Option("--thread", "-t", envvar="SNAPCORE_THREAD", metavar="THREAD", help="The thread; needed for latest and label:L."),
]
Spec = Annotated[
    str | None,
    typer.Option("--checkpoint", "-c", metavar="WHICH", help="latest, label:L, an id, or the start of one."),
]
At = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="latest, label:L, an id, or the start of one.")]
Wait = Annotated[
    float | None,
    typer.Option("--wait", metavar="SECONDS", help="Wait this long when another writer holds the thread."),
]
SecretEnv = Annotated[
    list[str] | None,
    typer.Option("--secret-env", metavar="NAME", help="A secret: the value of this environment variable. Repeatable."),
]
SecretFile = Annotated[
    list[str] | None,
    typer.Option("--secret-file", metavar="NAME=PATH", help="A secret: what the file holds. Repeatable."),
]
SecretCommand = Annotated[
    list[str] | None,
    typer.Option(
        "--secret-command",
        metavar="NAME=COMMAND",
        help="A secret: what the command writes to stdout. No shell runs it. Repeatable.",
    ),
]

_Patterns = list[str] | None
Label = Annotated[str | None, typer.Option("--label", "-l", help="A name for this checkpoint.")]
Include = Annotated[
    _Patterns, typer.Option("--include", metavar="PATTERN", help="Only what matches, as in .gitignore. Repeatable.")
]
Exclude = Annotated[_Patterns, typer.Option("--exclude", metavar="PATTERN", help="Leave out what matches, too. Repeatable.")]
Everything = Annotated[
    bool | None,
    typer.Option(
        "--everything/--no-everything",
        help="Without the default exclusions: .git, .env files, node_modules, ...",
        show_default=False,
    ),
]
WithGit = Annotated[bool | None, typer.Option("--with-git/--no-with-git", help="Keep .git.", show_default=False)]
KeepRebuildable = Annotated[
    bool | None,
    typer.Option("--keep-rebuildable/--no-keep-rebuildable", help="Keep node_modules, .venv and their like.", show_default=False),
]
OnUnsupported = Annotated[
    str | None,
    typer.Option("--on-unsupported", metavar="error|skip", help="FIFOs, sockets, devices, links leading outside; else error."),
]
