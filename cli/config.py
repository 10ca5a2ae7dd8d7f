"""`snapcore config`: which settings hold, and where each comes from."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from snapcore.addresses import HIDDEN, shown_address
from snapcore.errors import SnapcoreError

from .effective import secret_sources
from .options import OptionalThread, SecretCommand, SecretEnv, SecretFile
from .output import print_json, print_line, print_table
from .runtime import Exit, Invocation, command, interruptible, usage_errors

if TYPE_CHECKING:
    from snapcore.settings import SecretSource

__all__ = ["EXAMPLES", "config"]

EXAMPLES: Final = {
    "config": ("snapcore config", "snapcore config --check", "snapcore config --config deploy/snapcore.toml --json"),
}
ADDRESSES: Final = ("repo", "database")
WIDTH: Final = 80
FOUND: Final = "found: it runs no command"


@dataclass(frozen=True, slots=True)
class Row:
    """A setting that holds. `source` is `flag`, `environment`, `file` or `default`; `name` the flag, variable or key."""

    key: str
    value: Any
    source: str
    name: str


@dataclass(frozen=True, slots=True)
class SecretRow:
    """A secret: its name, where it was asked for, what its value comes from (without anything that could be one), and whether
    that can be had: `present`, `missing` (`message` says why), or `not tried`."""

    name: str
    source: str
    kind: str
    origin: str
    state: str
    message: str = ""


@command
async def config(
    invocation: Invocation,
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Try every secret, and run the commands for it; end with 1 when one cannot be had.")
    ] = False,
    thread: OptionalThread = None,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    secret_command: SecretCommand = None,
) -> int:
    """Show the settings that hold, and where each comes from.

    Flags go before environment variables, these before the settings file. Nothing of a secret's value is shown, only whether it
    can be had; passwords in addresses are hidden.
    """
    rows = [*_common(invocation), *_policy(invocation), *_scheduled(invocation)]
    with usage_errors():
        flags = secret_sources(secret_env, secret_file, secret_command)
    secrets = list(_secrets(invocation, flags, check=check))
    loaded = invocation.loaded
    if invocation.json:
        print_json(
            {
                "message_type": "config",
                "file": None if loaded is None else loaded.path,
                "named": None if loaded is None else loaded.named,
                "settings": [_fields(row) for row in rows],
                "secrets": [_fields(row) for row in secrets],
            }
        )
    elif invocation.tells:
        _tell(invocation, rows, secrets)
    return Exit.FAILED if check and any(row.state == "missing" for row in secrets) else Exit.DONE


def _common(invocation: Invocation) -> Iterator[Row]:
    for key in ("repo", "database", "thread", "progress"):
        found = invocation.effective(key)
        value = shown_address(found.value) if key in ADDRESSES and found.value else found.value
        yield Row(key, value, found.source, found.name)


def _policy(invocation: Invocation) -> Iterator[Row]:
    from snapcore.settings import PolicySettings

    invocation.policy()  # what makes no sense in the file is told as wrong usage
    policy = PolicySettings() if invocation.loaded is None else invocation.loaded.settings.policy
    yield from _table("policy", policy)


def _scheduled(invocation: Invocation) -> Iterator[Row]:
    """What `snapcore cron` reads, where a file has any of it."""
    from snapcore.settings import CronSettings

    if invocation.loaded is None:
        return
    settings = invocation.loaded.settings
    if settings.jobs or settings.cron != CronSettings():
        yield from _table("cron", settings.cron)
    for name, job in settings.jobs.items():
        place = shown_address(job.select or "" if job.sandbox is None else invocation.loaded.address(job.sandbox))
        yield Row(f"jobs.{name}", place, "file", f"jobs.{name}")


def _table(name: str, table: msgspec.Struct) -> Iterator[Row]:
    """The rows of a table of the file. A value that is the default is one wherever it stands."""
    for field in msgspec.structs.fields(table):
        key, value = f"{name}.{field.encode_name}", getattr(table, field.name)
        if isinstance(value, msgspec.Struct):
            yield from _table(key, value)
        elif value == field.default:
            yield Row(key, _plain(value), "default", "")
        else:
            yield Row(key, _plain(value), "file", key)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _secrets(invocation: Invocation, flags: "Mapping[str, SecretSource]", *, check: bool) -> Iterator[SecretRow]:
    if (loaded := invocation.loaded) is not None:
        for name, source in loaded.settings.secrets.items():
            if name not in flags:
                yield _secret(name, source, "file", loaded.folder, may_run=loaded.named, check=check)
    for name, source in flags.items():
        yield _secret(name, source, "flag", "", may_run=True, check=check)


def _secret(name: str, source: "SecretSource", asked_by: str, folder: str, *, may_run: bool, check: bool) -> SecretRow:
    from snapcore.secret_sources import secret_values, without_waiting

    kind, origin = _origin(source)
    if not check and not without_waiting(source, folder=folder) and (may_run or source.command is None):
        return SecretRow(name, asked_by, kind, origin, "not tried")
    try:
        with interruptible():
            secret_values({name: source}, folder=folder, may_run=may_run)
    except SnapcoreError as error:
        return SecretRow(name, asked_by, kind, origin, "missing", str(error))
    return SecretRow(name, asked_by, kind, origin, "present")


def _origin(source: "SecretSource") -> tuple[str, str]:
    if source.env is not None:
        return "env", source.env
    if source.file is not None:
        return "file", source.file
    words = source.command or ""
    first, *rest = words.split(maxsplit=1) if isinstance(words, str) else words
    return "command", f"{first} {HIDDEN}" if rest else first


def _fields(row: Row | SecretRow) -> dict[str, Any]:
    return msgspec.to_builtins(row)  # type: ignore[no-any-return]  # of a dataclass it is a dict


def _tell(invocation: Invocation, rows: list[Row], secrets: list[SecretRow]) -> None:
    loaded = invocation.loaded
    if loaded is None:
        print_line("no settings file")
    else:
        print_line(f"settings file {loaded.path} ({'named' if loaded.named else FOUND})")
    print_line()
    print_table(("KEY", "FROM", "VALUE"), [cells for row in rows for cells in _cells(row)])
    if secrets:
        print_line()
        print_table(("SECRET", "FROM", "STATE"), [(row.name, f"{row.kind} {row.origin}", row.state) for row in secrets])
    for row in secrets:
        for line in textwrap.wrap(f"{row.name}: {row.message}" if row.message else "", WIDTH, subsequent_indent="  "):
            print_line(line)


def _cells(row: Row) -> Iterator[tuple[str, str, str]]:
    """A line for the value, or one for each value of a list."""
    source = row.name if row.source in ("flag", "environment") else row.source
    values = row.value if isinstance(row.value, list) else [row.value]
    shown = [_text(value) for value in values] or ["-"]
    yield row.key, source, shown[0]
    yield from (("", "", each) for each in shown[1:])


def _text(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
