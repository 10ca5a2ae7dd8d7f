"""The command's frame: which commands there are, loaded one by one, and how their parameters are read."""

import importlib
import re
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

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
    "diff": "contents",
    "fork": "history",
    "rewind": "history",
    "label": "history",
    "delete": "history",
    "forget": "cleanup",
    "gc": "cleanup",
    "verify": "repositories",
    "repair": "repair",
    "stats": "repositories",
    "threads": "history",
    "log": "log",
    "export": "transfer",
    "import": "transfer",
    "mcp": "mcp",
}
GROUPS: Final = {"store": {"test": "store"}}  # commands of two words, whose functions are called store_test and so on
ALIASES: Final = {"snapshots": "list", "check": "verify", "prune": "gc"}

_PLAIN: Final = (str, int, float, bool)
_WHOLE: Final = re.compile(r"-?[0-9]+")


def _convert_plainly(param: Any) -> None:
    """Have a parameter of a plain type converted here; whatever is out of the ordinary is left to Typer and its words."""
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    convert = getattr(annotation, "__args__", (annotation,))[0]
    if convert not in _PLAIN or "process_value" in vars(param):
        return
    checked = param.process_value

    def process_value(ctx: Any, value: Any) -> Any:
        # An empty text is a variable of the caller's that was not set, never a place or a name that is meant.
        if value == "" or (param.multiple and value and "" in value):
            raise typer.BadParameter("it is empty.", ctx=ctx, param=param)
        if value is None and not param.required:
            return param.callback(ctx, param, value) if param.callback else None
        if value is None or param.callback or convert is bool:
            return checked(ctx, value)
        if convert is int and not all(_WHOLE.fullmatch(str(item)) for item in (value if param.multiple else [value])):
            raise typer.BadParameter(f"{value!r} is not a whole number.", ctx=ctx, param=param)  # int() takes 1_0 and ٣ too
        try:
            return [convert(item) for item in value] if param.multiple else convert(value)
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

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        from .help import write_command

        write_command(self, ctx, formatter)


class Group(_Plain, TyperGroup):
    """The command group: a command's module is imported when that command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names in the order of the help page."""
        return [*COMMANDS, *GROUPS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name or alias, or None."""
        name = ALIASES.get(cmd_name, cmd_name)
        if name in GROUPS:
            return _group(name)
        return _command(name, COMMANDS[name]) if name in COMMANDS else None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        from .help import write_group

        write_group(self, ctx, formatter)


class _Subgroup(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        from .help import write_group

        write_group(self, ctx, formatter)


def _command(name: str, module: str, group: str = "") -> Any:
    """The command `name`, a function of a module of this package, with what the module's EXAMPLES has for it.

    The function is called as the command, `group_name` in a group, with an underscore at its end where Python has the word.
    """
    loaded = importlib.import_module(f".{module}", __package__)
    words = f"{group} {name}".strip()
    called = words.replace(" ", "_")
    function = getattr(loaded, f"{called}_", None) or getattr(loaded, called)
    single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    single.command(name, cls=Command, context_settings={"help_option_names": ["-h", "--help"]})(function)
    made: Any = get_command(single)
    made.examples = tuple(getattr(loaded, "EXAMPLES", {}).get(words, ()))
    return made


def _group(name: str) -> Any:
    """The group `name`, whose help is its module's docstring."""
    modules = GROUPS[name]
    help_text = importlib.import_module(f".{name}", __package__).__doc__
    settings = {"help_option_names": ["-h", "--help"]}
    group = _Subgroup(name=name, help=help_text, no_args_is_help=True, context_settings=settings, rich_markup_mode=None)
    for each, module in modules.items():
        group.add_command(_command(each, module, name), each)
    return group


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"snapcore {version('snapcore')}")
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
