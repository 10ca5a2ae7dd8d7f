"""The command's frame: which commands there are, loaded one by one, and how their parameters are read."""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from .version import version_line

__all__ = ["ALIASES", "COMMANDS", "app"]

# Name -> module of this package that holds it as a function of the same name (`list_` and `import_` with an underscore). Such a
# module's EXAMPLES has lines for a shell by the command's words: {"store test": ("snapcore store test ./here",)}.
COMMANDS: Final = {
    "init": "repositories",
    "capture": "capture",
    "restore": "restore",
    "list": "history",
    "show": "history",
    "ls": "contents",
    "cat": "contents",
    "diff": "diff",
    "fork": "history",
    "rewind": "history",
    "label": "history",
    "delete": "history",
    "forget": "cleanup",
    "gc": "cleanup",
    "verify": "repositories",
    "repair": "repair",
    "stats": "stats",
    "threads": "history",
    "log": "log",
    "exec": "exec",
    "export": "transfer",
    "import": "transfer",
    "mcp": "mcp",
    "config": "config",
    "completion": "completion",
    "help": "help",
}
GROUPS: Final = {  # commands of two words, whose functions are called store_test and so on
    "store": {"test": "store"},
    "cron": {"run": "cron", "status": "cron_status", "install": "cron_install"},
}
ALIASES: Final = {"snapshots": "list", "check": "verify", "prune": "gc"}

SIMILAR: Final = 0.7  # of difflib's measure, from 0 to 1
USAGE_ERROR: Final[Any] = typer.BadParameter.__base__  # Typer has no public name for it
_PLAIN: Final = (str, int, float, bool)
_WHOLE: Final = re.compile(r"-?[0-9]+")


def _convert_plainly(param: Any) -> None:
    """Have a parameter of a plain type converted here; whatever is out of the ordinary is left to Typer and its words."""
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    convert = getattr(annotation, "__args__", (annotation,))[0]
    if convert not in _PLAIN or "process_value" in vars(param):
        return
    checked = param.process_value
    repeated = param.nargs != 1 or getattr(param, "multiple", False)

    def process_value(ctx: Any, value: Any) -> Any:
        # An empty text is a variable of the caller's that was not set, never a place or a name that is meant.
        if not param.hidden and (value == "" or (repeated and value and "" in value)):
            raise typer.BadParameter("it is empty.", ctx=ctx, param=param)
        if value is None and not param.required:
            return param.callback(ctx, param, value) if param.callback else None
        if value is None or param.callback or convert is bool:
            return checked(ctx, value)
        if convert is int and not all(_WHOLE.fullmatch(str(item)) for item in (value if repeated else [value])):
            raise typer.BadParameter(f"{value!r} is not a whole number.", ctx=ctx, param=param)  # int() takes 1_0 and ٣ too
        try:
            return [convert(item) for item in value] if repeated else convert(value)
        except ValueError:
            return checked(ctx, value)

    param.process_value = process_value


class _Plain:
    """Parameters converted without pydantic.

    Typer 0.29 loads pydantic, 100 to 130 ms, to turn a text into an int. A capture of a few changed files takes not much
    longer than that altogether.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            _convert_plainly(param)
        return params


class Command(_Plain, TyperCommand):
    """One command. `examples` are lines for a shell, shown in its help."""

    examples: tuple[str, ...] = ()

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What follows the command's name in the line that says how to use it."""
        params = self.get_params(ctx)
        needed = [f"{max(p.opts, key=len)} {p.metavar}" for p in params if p.param_type_name == "option" and p.required]
        arguments = [p for p in params if p.param_type_name == "argument" and not p.hidden]
        named = [p.display_name_raw if p.required else f"[{p.display_name_raw}]" for p in arguments]
        repeated = ["..." if p.nargs != 1 else "" for p in arguments]
        return [*needed, "[OPTIONS]", *map("".join, zip(named, repeated, strict=True))]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; of a mistyped option, name those that may have been meant."""
        with _suggesting():
            return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        from .help import write_command

        write_command(self, ctx, formatter)


@contextmanager
def _suggesting() -> Iterator[None]:
    try:
        yield
    except USAGE_ERROR as error:
        if possible := getattr(error, "possibilities", None):
            error.possibilities = None
            error.message = f"{error.message}.{_meant(error.option_name, possible)}"
        raise


def _without_credentials(message: str, words: Sequence[str]) -> str:
    from snapcore.addresses import shown_address

    for typed in (part for word in words for part in (word, word.partition("=")[2])):
        if (shown := shown_address(typed)) != typed:
            message = message.replace(typed, shown).replace(repr(typed)[1:-1], shown)
    return message


def _meant(typed: str, known: Sequence[str]) -> str:
    import difflib

    if not typed:  # which all begin with
        return ""
    likely = difflib.get_close_matches(typed, known, cutoff=SIMILAR) or [name for name in known if name.startswith(typed)]
    return f" Did you mean {' or '.join(likely)}?" if likely else ""


class Group(_Plain, TyperGroup):
    """Commands by name. A command's module is imported when that command is asked for."""

    def __init__(self, *, found: Mapping[str, Callable[[], Any]] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._found = _all() if found is None else found
        self._words: tuple[str, ...] = ()

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the command, under the name that its pages have, however it was started."""
        return super().main(*args, **{"prog_name": "snapcore", **settings})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments before the command's name; of a mistyped option, name those that may have been meant."""
        self._words = tuple(args)
        with _suggesting():
            return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """The names in the order of the help page."""
        return list(self._found)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what is wrong with its arguments is told without the credentials of an address among them."""
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            error.message = _without_credentials(error.message, self._words)
            raise

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name or alias, or None."""
        name = ALIASES.get(cmd_name, cmd_name)
        if name in self._found and name not in self.commands:
            self.commands[name] = self._found[name]()
        return self.commands.get(name)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Find the command; of a mistyped name, name those that may have been meant."""
        if args[0].startswith("-") or self.get_command(ctx, args[0]) is not None:
            return super().resolve_command(ctx, args)
        known = [*self._found, *ALIASES] if ctx.parent is None else list(self._found)
        raise USAGE_ERROR(f"No such command {args[0]!r}.{_meant(args[0], known)}", ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        from .help import write_group

        write_group(self, ctx, formatter)


def _all() -> dict[str, Callable[[], Any]]:
    commands: dict[str, Callable[[], Any]] = {name: partial(_command, name, module) for name, module in COMMANDS.items()}
    return commands | {name: partial(_group, name) for name in GROUPS}


def _command(name: str, module: str, group: str = "") -> Any:
    """The command `name`, a function of a module of this package, with what the module's EXAMPLES has for it.

    The function is called as the command, `group_name` in a group, with an underscore at its end where Python has the word.
    """
    loaded = importlib.import_module(f".{module}", __package__)
    words = f"{group} {name}".strip()
    called = words.replace(" ", "_")
    function = getattr(loaded, f"{called}_", None) or getattr(loaded, called)
    single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    made_by = getattr(function, "command_class", Command)
    single.command(name, cls=made_by, context_settings={"help_option_names": ["-h", "--help"]})(function)
    made: Any = get_command(single)
    made.examples = tuple(getattr(loaded, "EXAMPLES", {}).get(words, ()))
    return made


def _group(name: str) -> Any:
    """The group `name`, whose help is its module's docstring."""
    modules = GROUPS[name]
    help_text = importlib.import_module(f".{name}", __package__).__doc__
    settings = {"help_option_names": ["-h", "--help"]}
    found = {each: partial(_command, each, module, name) for each, module in modules.items()}
    return Group(found=found, name=name, help=help_text, no_args_is_help=True, context_settings=settings, rich_markup_mode=None)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_line())
        raise typer.Exit


app = typer.Typer(
    name="snapcore",
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True, callback=_version),
) -> None:
    """Save an agent's files as checkpoints, and put them back exactly."""
