"""The parameters that several commands share, each described once."""

from typing import Annotated, Final

import typer

__all__ = [
    "COMMON",
    "AllowAnyRoot",
    "At",
    "Database",
    "Debug",
    "DryRun",
    "Everything",
    "Exclude",
    "Include",
    "Json",
    "KeepRebuildable",
    "Label",
    "OptionalThread",
    "Quiet",
    "Repo",
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
    str,
    typer.Option(
        "--repo",
        "-r",
        envvar="SNAPCORE_REPO",
        metavar="URL",
        help="The repository: a folder or an address.",
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
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=COMMON)]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress; no result unless it was asked for as JSON.", rich_help_panel=COMMON),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.", rich_help_panel=COMMON)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=COMMON)]
AllowAnyRoot = Annotated[bool, typer.Option("--allow-any-root", help="Even / or a home folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would be done, and do nothing.")]

Thread = Annotated[str, typer.Option("--thread", "-t", metavar="THREAD", help="The thread.")]
OptionalThread = Annotated[
    str | None, typer.Option("--thread", "-t", metavar="THREAD", help="The thread; needed for latest and label:L.")
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

_Patterns = list[str] | None
Label = Annotated[str | None, typer.Option("--label", "-l", help="A name for this checkpoint.")]
Include = Annotated[
    _Patterns, typer.Option("--include", metavar="PATTERN", help="Only what matches, as in .gitignore. Repeatable.")
]
Exclude = Annotated[_Patterns, typer.Option("--exclude", metavar="PATTERN", help="Leave out what matches, too. Repeatable.")]
Everything = Annotated[
    bool, typer.Option("--everything", help="Without the default exclusions: .git, .env files, node_modules, ...")
]
WithGit = Annotated[bool, typer.Option("--with-git", help="Keep .git.")]
KeepRebuildable = Annotated[bool, typer.Option("--keep-rebuildable", help="Keep node_modules, .venv and their like.")]
