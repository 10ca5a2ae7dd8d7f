"""`snapcore completion`: scripts that teach a shell to complete the command, and the answers that they ask for.

A script calls `snapcore completion SHELL -- WORD...` with the words up to the cursor, the last one perhaps empty; bash, which
takes words apart at : and =, with the line up to the cursor instead. The first line of the answer is its kind, `words`, `files`
or `folders`; each further line is a word, a tab, and what it is.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from snapcore.errors import SnapcoreError, printable

from .completion_scripts import SCRIPTS
from .output import count
from .runtime import Invocation

if TYPE_CHECKING:
    from snapcore.model import Checkpoint
    from snapcore.repository import Repository

__all__ = ["EXAMPLES", "completion"]

EXAMPLES: Final = {
    "completion": (
        "# bash, for this user",
        "snapcore completion bash > ~/.local/share/bash-completion/completions/snapcore",
        "# bash, for this shell alone",
        'eval "$(snapcore completion bash)"',
        "# zsh, in a folder of $fpath",
        "snapcore completion zsh > ~/.zfunc/_snapcore",
        "# fish",
        "snapcore completion fish > ~/.config/fish/completions/snapcore.fish",
    )
}
LIMIT_SECONDS: Final = 2.0  # then there is no answer
MOST: Final = 100
WORD_BREAKS: Final = ":="  # of bash, which completes what follows the last of them
_LAST: Final = re.compile(r"(?:\\.|[^\s\\])*\Z", re.DOTALL)
_NOT_CONTINUED: Final = re.compile(r"['\"]|\\[:=\\]")
FOLDERS: Final = ("DIR", "NAME=DIR", "URL", "ADDRESS", "FOLDER")
FILES: Final = ("FILE", "FILE|-", "FILE|DIR|-", "NAME=PATH")
CHECKPOINTS: Final = ("CHECKPOINT", "CHECKPOINT[:PATH]", "WHICH")
SETTINGS: Final = ("repo", "database", "config", "thread")  # options that say where to look

Item = tuple[str, str]  # a word, and what it is


def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell.")],
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Print a script that teaches a shell to complete this command.

    It completes commands, options and what they take, files, and, from the repository that the words, the environment or the
    settings file name, threads, labels, checkpoints and the paths in them. A repository that does not answer within two seconds
    is left alone.
    """
    if shell not in SCRIPTS:
        raise typer.BadParameter(f"{shell!r} is none of {', '.join(SCRIPTS)}.", param_hint="SHELL")
    if words is None:
        sys.stdout.write(SCRIPTS[shell])
        return
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    if shell == "bash":
        words = _words(words[0])
    kind, items = _answer(words) if words else ("words", [])
    signal.setitimer(signal.ITIMER_REAL, 0)
    cut = _cut(words[-1]) if shell == "bash" and words else 0
    sys.stdout.write(f"{kind}\n")
    for word, about in items:
        if word.isprintable():
            sys.stdout.write(f"{word[cut:]}\t{printable(about)}\n")


def _words(line: str) -> list[str]:
    """The words of a line of bash after the command's, without their quotes; none when what follows could not be put into the
    last one: within quotes, or after a : or = that is quoted."""
    import shlex

    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:
        return []
    last = _LAST.search(line)
    if last is None or _NOT_CONTINUED.search(last[0]):
        return []
    return words[1:] if last[0] else [*words[1:], ""]


def _cut(word: str) -> int:
    """How much of a word bash does not want to hear again."""
    return max(word.rfind(each) for each in WORD_BREAKS) + 1


@dataclass
class _Line:
    """A command line as far as it was typed. `waiting` is the option whose value comes next."""

    command: Any
    ctx: Any
    given: dict[str, list[str]] = field(default_factory=dict)  # by the parameter's name
    positional: int = 0
    waiting: Any = None
    plain: bool = False  # after --

    def take(self, word: str) -> bool:
        """Take a complete word. False: there is no such command."""
        if self.waiting is not None:
            self._give(self.waiting, word)
            self.waiting = None
        elif word == "--" and not self.plain:
            self.plain = True
        elif word.startswith("-") and word != "-" and not self.plain:
            self._take_option(word)
        elif hasattr(self.command, "list_commands"):
            return self._descend(word)
        else:
            self.positional += 1
        return True

    def _descend(self, word: str) -> bool:
        found = self.command.get_command(self.ctx, word)
        if found is None:
            return False
        self.command, self.ctx = found, typer.Context(found, info_name=word, parent=self.ctx, **found.context_settings)
        return True

    def _take_option(self, word: str) -> None:
        name, joined, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:
            name, joined, value = word[:2], "=", word[2:]
        option = self.option(name)
        if option is None:
            return
        if joined:
            self._give(option, value)
        elif option.is_flag:
            self._give(option, "")
        else:
            self.waiting = option

    def _give(self, option: Any, value: str) -> None:
        self.given.setdefault(option.name, []).append(value)

    def options(self) -> list[Any]:
        return [p for p in self.command.get_params(self.ctx) if p.param_type_name == "option" and not p.hidden]

    def option(self, name: str) -> Any:
        return next((option for option in self.options() if name in (*option.opts, *option.secondary_opts)), None)

    def argument(self) -> Any:
        """The argument that comes next."""
        arguments = [p for p in self.command.get_params(self.ctx) if p.param_type_name == "argument"]
        if self.positional < len(arguments):
            return arguments[self.positional]
        return arguments[-1] if arguments and arguments[-1].nargs == -1 else None


def _answer(words: Sequence[str]) -> tuple[str, list[Item]]:
    from .app import app

    root: Any = typer.main.get_command(app)
    line = _Line(root, typer.Context(root, info_name="snapcore", **root.context_settings))
    *complete, typed = words
    if not all(line.take(word) for word in complete):
        return "words", []
    if line.waiting is not None:
        return _values(line, line.waiting, typed, "")
    if typed.startswith("-") and not line.plain:
        name, joined, value = typed.partition("=")
        option = line.option(name)
        if joined and option is not None:
            return _values(line, option, value, f"{name}=")
        return "words", list(_beginning(typed, _option_names(line)))
    if hasattr(line.command, "list_commands"):
        return "words", list(_beginning(typed, _command_names(line)))
    argument = line.argument()
    return ("words", []) if argument is None else _values(line, argument, typed, "")


def _beginning(typed: str, items: Iterable[Item]) -> Iterable[Item]:
    return (item for item in items if item[0].startswith(typed))


def _command_names(line: _Line) -> Iterable[Item]:
    from .help import summary

    for name in line.command.list_commands(line.ctx):
        yield name, summary(line.command.get_command(line.ctx, name))


def _option_names(line: _Line) -> Iterable[Item]:
    for option in line.options():
        if option.name not in line.given or option.multiple:
            for name in (*option.opts, *option.secondary_opts):
                yield name, option.help or ""


def _values(line: _Line, param: Any, typed: str, before: str) -> tuple[str, list[Item]]:
    """What can stand for a parameter; `before` stands before it in the same word."""
    metavar = param.metavar or ""
    if metavar in FOLDERS + FILES:
        return ("folders" if metavar in FOLDERS else "files"), []
    if "|" in metavar and metavar.islower():
        found: Iterable[Item] = [(choice, "") for choice in metavar.split("|")]
    elif param.name == "secret_env":
        found = [(name, "") for name in sorted(os.environ)]
    elif metavar == "COMMAND" and line.command.name == "help":
        root = line.ctx.find_root()
        found = _command_names(_Line(root.command, root))
    else:
        found = _stored(line, metavar, typed)
    return "words", [(before + word, about) for word, about in _beginning(typed, found)][:MOST]


def _stored(line: _Line, metavar: str, typed: str) -> list[Item]:
    """Words from the repository; none when it cannot be asked."""
    if metavar not in ("THREAD", "L", *CHECKPOINTS):
        return []
    flags = {name: values[-1] for name, values in line.given.items() if name in SETTINGS}
    invocation = Invocation(quiet=True, flags=flags, no_config="no_config" in line.given)
    try:
        return asyncio.run(_ask(invocation, metavar, typed))
    except (SnapcoreError, OSError):
        return []


async def _ask(invocation: Invocation, metavar: str, typed: str) -> list[Item]:
    async with invocation.repository() as repo:
        if metavar == "THREAD":
            return [(each.thread_id, count(each.checkpoints, "checkpoint")) for each in await repo.threads()]
        thread = invocation.effective("thread").value
        if metavar == "CHECKPOINT[:PATH]" and ":" in typed.removeprefix("label:"):
            return [item async for item in _paths(repo, typed, thread)]
        checkpoints = list(reversed(await repo.list(thread))) if thread else await repo.checkpoints.find(typed) if typed else []
        labels = dict.fromkeys(c.label for c in checkpoints if c.label) if thread else {}
        if metavar == "L":
            return [(label, "") for label in labels]
        named = [("latest", "the newest")] if thread and checkpoints else []
        return [*named, *((f"label:{label}", "") for label in labels), *((c.id, _about(c)) for c in checkpoints)]


def _about(checkpoint: "Checkpoint") -> str:
    when = checkpoint.created.isoformat(" ", "seconds").replace("+00:00", "Z")
    return f"{when} {checkpoint.label}" if checkpoint.label else when


async def _paths(repo: "Repository", typed: str, thread: str | None) -> AsyncIterator[Item]:
    """The paths in the folder of a checkpoint that is being typed."""
    from snapcore.model import Kind

    from .contents import split_place

    folder = typed.rpartition("/")[0] if "/" in typed else typed[: typed.rindex(":") + 1]
    spec, path = split_place(folder)
    prefix = f"{spec}:"
    checkpoint = await repo.resolve(spec, thread)
    async for entry in repo.ls(checkpoint, path, recursive=False):
        if entry.path not in (b"", path):
            yield prefix + os.fsdecode(entry.path) + ("/" if entry.kind == Kind.DIR else ""), ""
