"""Making the system start jobs: what would be written and run, and doing it. Nothing is changed before `apply`."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from snapcore.errors import Code, SnapshotError, printable

from . import crontab, systemd
from .entries import Entry, own_command, refused

__all__ = ["CrontabInstallation", "FileChange", "Installation", "SystemdInstallation", "has_systemd"]

SYSTEM_FOLDER: Final = "/etc/systemd/system"
RUNNING_SYSTEMD: Final = "/run/systemd/system"  # as sd_booted(3) finds out
SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file that is to be written, or removed where `text` is None. `before` is what it holds, None when it is not there."""

    path: str
    text: str | None
    before: str | None = None


class Installation(Protocol):
    """What is to be done for the jobs of one file."""

    @property
    def changes(self) -> Sequence[FileChange]:
        """Files that differ from what they should be; of a crontab, the block, whose `path` is empty."""
        ...

    @property
    def commands(self) -> Sequence[Sequence[str]]:
        """What is run afterwards."""
        ...

    def apply(self) -> bool:
        """Do it. Returns whether `commands` were run, too, or are left to the user. Raises `SnapshotError`, `OSError`."""
        ...


def has_systemd() -> bool:
    """Whether systemd is what runs this machine."""
    return os.path.isdir(RUNNING_SYSTEMD) and shutil.which("systemctl") is not None


class SystemdInstallation:
    """Units for the jobs of the file at `path`, instead of all units that it has had; no entries and no daemon remove them."""

    def __init__(
        self,
        path: str,
        entries: Sequence[Entry] = (),
        *,
        system: bool,
        daemon: bool = False,
        environment_file: str | None = None,
    ) -> None:
        self._folder = SYSTEM_FOLDER if system else _user_folder()
        self._systemctl = ["systemctl"] if system else ["systemctl", "--user"]
        command = [*own_command(), "cron", "run", path]
        units: list[systemd.Unit] = []
        for entry in entries:
            words = [*command, "--job", entry.name, "--once"]
            units += systemd.job_units(entry, words, path, system=system, environment_file=environment_file)
        if daemon:
            units.append(systemd.daemon_unit(command, path, system=system, environment_file=environment_file))
        self._enabled = [unit.name for unit in units if unit.enabled]
        self._stale = [name for name in _units(self._folder, systemd.prefix(path)) if name not in {unit.name for unit in units}]
        written = {unit.name: unit.text for unit in units}
        found = [self._change(name, text) for name, text in written.items()]
        self._changes = [change for change in found if change.text != change.before]
        self._changes += [self._change(name, None) for name in self._stale]

    @property
    def changes(self) -> Sequence[FileChange]:
        """Unit files that are to be written or removed."""
        return self._changes

    @property
    def commands(self) -> Sequence[Sequence[str]]:
        """What tells systemd."""
        changed = {os.path.basename(change.path) for change in self._changes if change.before is not None}
        restarted = [name for name in self._enabled if name in changed]
        commands = [[*self._systemctl, "daemon-reload"]]
        if self._enabled:
            commands.append([*self._systemctl, "enable", "--now", *self._enabled])
        if restarted:
            commands.append([*self._systemctl, "restart", *restarted])
        return commands

    def apply(self) -> bool:
        """Write and remove files, then tell systemd when it runs."""
        running = has_systemd()
        started = [name for name in self._stale if name.endswith(".timer") or f"{name[:-8]}.timer" not in self._stale]
        if running and started:
            _run([*self._systemctl, "disable", "--now", *started])
        for change in self._changes:
            if change.text is None:
                os.unlink(change.path)
            else:
                _write(change.path, change.text)
        for command in self.commands if running else ():
            _run(command)
        return running

    def _change(self, name: str, text: str | None) -> FileChange:
        path = os.path.join(self._folder, name)
        return FileChange(path, text, _read(path))


class CrontabInstallation:
    """The block of the file at `path` in the user's crontab, with a line for each entry; without entries it is removed."""

    def __init__(self, path: str, entries: Sequence[Entry] = (), *, environment_file: str | None = None) -> None:
        commands = [[*own_command(), "cron", "run", path, "--job", entry.name, "--once", "-q"] for entry in entries]
        self._path = path
        self._block = ""
        if entries:
            zone = crontab.local_zone()
            self._block = crontab.block(entries, commands, path, zone=zone, environment_file=environment_file)
        before = _crontab()
        self._changed = crontab.replaced(before, path, self._block) != before

    @property
    def changes(self) -> Sequence[FileChange]:
        """The block, or its removal."""
        return [FileChange("", self._block or None)] if self._changed else []

    @property
    def commands(self) -> Sequence[Sequence[str]]:
        """None: cron sees a change by itself."""
        return []

    def apply(self) -> bool:
        """Write the crontab, as it is by now with the new block."""
        new = crontab.replaced(_crontab(), self._path, self._block)
        _run(["crontab", "-"], new)
        return True


def _user_folder() -> str:
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(base, "systemd", "user")


def _units(folder: str, prefix: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name.startswith(prefix) and name.endswith((".service", ".timer")))


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _write(path: str, text: str) -> None:
    """Put a unit file in its place, whole or not at all."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    beside = f"{path}.{os.getpid()}.tmp"  # systemd reads no name that ends so
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        if os.path.exists(beside):
            os.unlink(beside)
        raise


def _crontab() -> bytes:
    """The user's crontab, empty when there is none."""
    done = _started(["crontab", "-l"])
    if done.returncode == 0:
        return done.stdout
    if not done.stdout and b"no crontab" in done.stderr:
        return b""
    raise _failed(["crontab", "-l"], done.stderr)


def _run(command: Sequence[str], given: bytes = b"") -> None:
    done = _started(command, given)
    if done.returncode:
        raise _failed(command, done.stderr)


def _started(command: Sequence[str], given: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run(command, input=given, capture_output=True, check=False, timeout=SECONDS)
    except FileNotFoundError:
        raise refused(
            f"There is no {command[0]} on this machine.", "Install it (package cron), or use --systemd, or snapcore cron run."
        ) from None
    except subprocess.TimeoutExpired:
        raise _failed(command, f"it did not end within {SECONDS:g} seconds".encode()) from None


def _failed(command: Sequence[str], stderr: bytes) -> SnapshotError:
    said = printable(" ".join(stderr.decode("utf-8", "replace").split())[:500])
    return SnapshotError(
        f"`{' '.join(command)}` failed: {said or 'it says nothing of why'}",
        code=Code.INVALID_REQUEST,
        hint="See to what it says, then run this command again.",
    )
