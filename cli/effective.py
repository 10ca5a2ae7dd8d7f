"""What holds of the common settings: a flag, else an environment variable, else the settings file, else a default."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from snapcore.errors import Code, SnapshotError

if TYPE_CHECKING:
    from snapcore.settings import PolicySettings, SecretSource
    from snapcore.settings_files import Loaded

__all__ = ["DEFAULTS", "PROGRESS", "VARIABLES", "Effective", "Source", "effective", "effective_policy", "secret_sources"]

Source = Literal["flag", "environment", "file", "default"]
VARIABLES: Final = {
    "repo": "SNAPCORE_REPO",
    "database": "SNAPCORE_DATABASE",
    "thread": "SNAPCORE_THREAD",
    "progress": "SNAPCORE_PROGRESS",
    "config": "SNAPCORE_CONFIG",
}
DEFAULTS: Final[Mapping[str, str | None]] = {"repo": "~/.snapcore", "database": None, "thread": None, "progress": "auto"}
PROGRESS: Final = ("auto", "plain", "none")


@dataclass(frozen=True, slots=True)
class Effective:
    """A value, and where it comes from: the source, with the flag, the variable or the file's key in `name`."""

    value: str | None
    source: Source
    name: str = ""


def effective(key: str, flag: str | None, loaded: "Loaded | None") -> Effective:
    """What holds of `repo`, `database`, `thread` or `progress`. Places that the file names are relative to its folder."""
    if flag is not None:
        return Effective(flag, "flag", f"--{key}")
    if given := os.environ.get(VARIABLES[key]):
        return Effective(given, "environment", VARIABLES[key])
    written = None if loaded is None else getattr(loaded.settings, key)
    if loaded is None or written is None:
        return Effective(DEFAULTS[key], "default")
    if key == "repo":
        written = loaded.address(written)
    elif key == "database":
        written = loaded.database(written)
    return Effective(written, "file", key)


def effective_policy(flags: Mapping[str, Any], loaded: "Loaded | None") -> "PolicySettings":
    """The policy of the file, with what flags say by the names of its fields: exclusions are added, all else is replaced by
    what is not None."""
    import msgspec

    from snapcore.settings import PolicySettings

    base = PolicySettings() if loaded is None else loaded.settings.policy
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items() if value is not None}
    if "exclude" in changes:
        changes["exclude"] = (*base.exclude, *changes["exclude"])
    return msgspec.structs.replace(base, **changes)


def secret_sources(variables: list[str] | None, files: list[str] | None, commands: list[str] | None) -> "dict[str, SecretSource]":
    """The sources that `--secret-env`, `--secret-file` and `--secret-command` name, by the secret's name. Raises `SnapshotError`
    `INVALID_REQUEST` for one that does not have its option's form."""
    if not (variables or files or commands):
        return {}
    from snapcore.redaction_hooks import checked_name
    from snapcore.settings import SecretSource

    found = {name: SecretSource(env=name) for name in variables or ()}
    for given in files or ():
        name, path = _pair(given, "--secret-file takes NAME=PATH.")
        found[name] = SecretSource(file=path)
    for given in commands or ():
        name, words = _pair(given, "--secret-command takes NAME=COMMAND.")
        found[name] = SecretSource(command=words)
    for name in found:
        checked_name(name, "a secret")
    return found


def _pair(given: str, form: str) -> tuple[str, str]:
    name, separator, value = given.partition("=")
    if not (separator and name and value):
        raise SnapshotError(form, code=Code.INVALID_REQUEST)
    return name, value
