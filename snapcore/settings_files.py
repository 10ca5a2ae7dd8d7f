"""Finding and reading `snapcore.toml`, or `[tool.snapcore]` of a `pyproject.toml`.

A file is either named by the user, who answers for it, or merely found: in the current folder or above. An agent may have written
a file that was found, so that one belongs to the caller or to root, and may start no command. No message holds a value of a file:
somebody may have written a secret there.

What reads a file is imported once there is one.
"""

import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

from .addresses import shown_address
from .errors import Code, SnapshotError, printable
from .registry import split_scheme
from .settings_search import FILE_NAME, PROJECT_FILE_NAME, settings_candidates

if TYPE_CHECKING:
    from .settings import Settings

__all__ = ["MAX_FILE_BYTES", "Loaded", "check_sandbox_address", "find_settings", "load_settings"]

MAX_FILE_BYTES: Final = 1 << 20
SIMILAR: Final = 0.7  # of difflib's measure, from 0 to 1
_HELP: Final = "docs/configuration.md lists the keys and what they take."
_USE_ANOTHER: Final = "Name another with --config, or leave all of them aside with --no-config."
_TOML_HELP: Final = "See https://toml.io for how such files are written: texts stand in quotes, keys come once."
_WHERE: Final = re.compile(r"\(at line ([0-9]+), column ([0-9]+)\)")
_AT_END: Final = "(at end of document)"
_PLACE: Final = re.compile(r" - at `\$\.?([^`]*)`$")
# Where a pyproject.toml can begin to speak of snapcore's settings: a header, a dotted key, a key in [tool]; never a dependency in
# a list. To be sure takes the parser, which is not worth loading for what is no more than a project that uses snapcore.
_MENTION: Final = re.compile(
    rb"""^(?:\xef\xbb\xbf)?[ \t]*(?:\[[ \t]*){0,2}(?:["']?tool["']?[ \t]*(?:=|\..*snapcore)|["']?snapcore["']?[ \t]*[.=])""",
    re.MULTILINE,
)
_COMMAND_SCHEME: Final = "exec:"
_OTHER_KIND: Final = re.compile(r"(?:docker|e2b|exec|memory|s3|ssh):", re.IGNORECASE)  # also where the slashes were forgotten
_RELATIVE_SQLITE: Final = re.compile(r"(sqlite(?:\+[a-z]+)?:///)(?!/|:memory:)(.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A settings file. Paths in `settings` are relative to `folder`; `path` and `folder` are absolute. `named` says that the
    user named it, so that it may do whatever a file can say; a file that was found runs no command."""

    settings: "Settings"
    path: str
    folder: str
    named: bool

    def address(self, address: str) -> str:
        """An address in the file, of a repository or a sandbox, as it is meant: a folder's path starts at the file's folder."""
        scheme, rest = split_scheme(address)
        if scheme != "file" or _OTHER_KIND.match(address) or (rest != address and not rest.startswith(("/", "~"))):
            return address  # after file:// the name of a host, which whoever opens it refuses or passes over
        path = os.path.join(self.folder, os.path.expanduser(rest))
        return path if ".." in path.split("/") else os.path.normpath(path)  # what '..' leads to is for the file system to say

    def database(self, url: str) -> str:
        """A database's URL in the file as it is meant: the path of a SQLite file starts at the file's folder."""
        match = _RELATIVE_SQLITE.match(url)
        if match is None:
            return url
        return match[1] + os.path.join(self.folder, "").replace("%", "%25").replace("?", "%3F") + match[2]


def load_settings(path: str) -> Loaded:
    """The settings in a file that the user named; of a `pyproject.toml`, those in its `[tool.snapcore]`.

    Raises `SnapshotError` `INVALID_REQUEST` for a file that cannot be read, is none, is larger than `MAX_FILE_BYTES`, or holds
    what is not understood; it names the file and the key, and no value.
    """
    if (shown := shown_address(path)) != path:
        raise _invalid(f"{printable(shown)} is an address, and no settings file.", _USE_ANOTHER)
    path = os.path.abspath(os.path.expanduser(path))
    parsed = _parsed(path, _read(path)[0])
    table = _tool_table(path, parsed) if os.path.basename(path) == PROJECT_FILE_NAME else parsed
    if table is None:
        raise _invalid(f"{printable(path)} has no [tool.snapcore].", "Write that table, or name another file.")
    return Loaded(_converted(path, table), path, os.path.dirname(path), named=True)


def find_settings(start: str) -> Loaded | None:
    """The settings that hold in the folder `start`: of the nearest `snapcore.toml`, or `pyproject.toml` with `[tool.snapcore]`,
    there or above; of the first where one folder has both. None when there is neither.

    Raises as `load_settings`, and for a file that belongs to somebody who is neither the caller nor root.
    """
    return next(filter(None, map(_found, settings_candidates(start))), None)


def check_sandbox_address(loaded: Loaded, address: str, key: str) -> None:
    """Raise `SnapshotError` `INVALID_REQUEST` when `address`, the value of `key` in the file, runs a command of this machine and
    the file was merely found."""
    if not loaded.named and address.lstrip().lower().startswith(_COMMAND_SCHEME):
        raise _invalid(
            f"{key} in {printable(loaded.path)} is an address that runs a command, and the file was found, not named.",
            f"If you trust the file, name it: --config {printable(loaded.path)}.",
        )


def _found(path: str) -> Loaded | None:
    """The settings in a file that is there; None for a `pyproject.toml` without any."""
    table = _own_table(path) if os.path.basename(path) == FILE_NAME else _project_table(path)
    return None if table is None else Loaded(_converted(path, table), path, os.path.dirname(path), named=False)


def _own_table(path: str) -> dict[str, Any]:
    data, details = _read(path)
    _check_owner(path, details)
    return _parsed(path, data)


def _project_table(path: str) -> dict[str, Any] | None:
    """`[tool.snapcore]` of a `pyproject.toml`. Most have none: they cost no more than reading them, and whatever is wrong with
    them is other programs' concern."""
    try:
        data, details = _read(path)
    except SnapshotError:
        return None
    if not _MENTION.search(data):
        return None
    table = _tool_table(path, _parsed(path, data))
    if table is not None:
        _check_owner(path, details)
    return table


def _read(path: str) -> tuple[bytes, os.stat_result]:
    """A file's bytes, up to one more than a settings file may have, and what it is."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # without waiting for a FIFO's other end
        try:
            details = os.fstat(descriptor)
            if not stat.S_ISREG(details.st_mode):
                raise _invalid(f"The settings file {printable(path)} is no regular file.", _USE_ANOTHER)
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(MAX_FILE_BYTES + 1), details
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no path"
        raise _invalid(f"The settings file {printable(path)} cannot be read: {reason}.", _USE_ANOTHER) from None


def _check_owner(path: str, details: os.stat_result) -> None:
    """Refuse a found file of somebody else, or one that somebody else has linked to: /tmp is above many a folder. To go on
    without it would be no better: its owner may be the user, and it would be its exclusions and secrets that are left out."""
    allowed = {0, os.geteuid()}
    if details.st_uid not in allowed or os.lstat(path).st_uid not in allowed:
        raise _invalid(
            f"The settings file {printable(path)} belongs to another user.",
            "If you trust it, name it with --config; --no-config leaves it aside.",
        )


def _tool_table(path: str, project: dict[str, Any]) -> dict[str, Any] | None:
    tool = project.get("tool")
    table = tool.get("snapcore") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise _invalid(f"tool.snapcore in {printable(path)} is no table.", _HELP)
    return table


def _parsed(path: str, data: bytes) -> dict[str, Any]:
    import tomllib

    if len(data) > MAX_FILE_BYTES:
        raise _invalid(f"The settings file {printable(path)} is larger than {MAX_FILE_BYTES >> 20} MiB.", _USE_ANOTHER)
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _invalid(f"{printable(path)} is not UTF-8, at line {line}.", _TOML_HELP) from None
    except (ValueError, RecursionError) as error:
        # The parser's own words may hold a part of the text.
        place = _WHERE.search(str(error))
        where = f", at line {place[1]}, column {place[2]}" if place else ", at its end" if _AT_END in str(error) else ""
        raise _invalid(f"{printable(path)} is not valid TOML{where}.", _TOML_HELP) from None


def _converted(path: str, table: dict[str, Any]) -> "Settings":
    """The settings. Tables whose names users choose are looked at first, one by one, so that an error can tell which it is."""
    from .settings import JobSettings, Settings

    prefix = "tool.snapcore." if os.path.basename(path) == PROJECT_FILE_NAME else ""
    _check_secrets(path, f"{prefix}secrets", table.get("secrets"))
    jobs = table.get("jobs")
    for name, job in jobs.items() if isinstance(jobs, dict) else ():
        key = f"{prefix}jobs.{name}"
        if isinstance(job, dict):
            _check_secrets(path, f"{key}.secrets", job.get("secrets"))
        _convert(path, key, job, JobSettings)
    settings: Settings = _convert(path, prefix.rstrip("."), table, Settings)
    return settings


def _check_secrets(path: str, key: str, sources: object) -> None:
    from .settings import SecretSource

    for name, source in sources.items() if isinstance(sources, dict) else ():
        if isinstance(source, str | int | float | list):
            raise _invalid(
                f"{printable(key)}.{printable(name)} in {printable(path)} is a value: none is read from a settings file.",
                "Say where it comes from, as { env = ... }, { file = ... } or { command = ... }. If a secret's value stands in"
                " the file, take it out.",
            )
        _convert(path, f"{key}.{name}", source, SecretSource)


def _convert(path: str, key: str, value: object, kind: Any) -> Any:
    import msgspec

    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        reason = str(error)[: place.start()] if place else str(error)
        where = ".".join(part for part in (key, place[1] if place else "") if part).replace(".[", "[")
        raise _invalid(f"{printable(path)}: {_told(reason, where)}", _HELP) from None


def _told(reason: str, where: str) -> str:
    """What is wrong at the key `where`, without the value."""
    shown = printable(where)
    if reason.startswith("Object contains unknown field"):
        name = reason.partition("`")[2].rstrip("`")
        return f"there is no key {printable(f'{where}.{name}' if where else name)}.{_meant(name)}"
    if reason.startswith("Invalid enum value"):
        return f"{shown} takes one of {', '.join(_keys()[where.rpartition('.')[2]])}."
    reason = reason.replace("`", "").replace(" | null", "")
    return f"{shown or 'the file'}: {reason[:1].lower()}{reason[1:]}."


def _meant(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, _keys(), n=1, cutoff=SIMILAR)
    return f" Did you mean {near[0]}?" if near else ""


def _keys() -> dict[str, list[str]]:
    """Every key that there is, with the words that it takes where it takes only some."""
    import msgspec

    from .settings import TABLES

    return {
        field.encode_name: [
            word for kind in (field.type, *get_args(field.type)) if get_origin(kind) is Literal for word in get_args(kind)
        ]
        for table in TABLES
        for field in msgspec.structs.fields(table)
    }


def _invalid(message: str, hint: str) -> SnapshotError:
    return SnapshotError(message, code=Code.INVALID_REQUEST, hint=hint)
