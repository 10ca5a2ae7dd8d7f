"""Where secrets come from: the environment, files, and what commands write to stdout. Never from arguments and settings files."""

import contextlib
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from .errors import Code, SnapshotError, printable
from .redaction_hooks import checked_name
from .settings import SecretSource

if TYPE_CHECKING:
    import subprocess

__all__ = ["COMMAND_SECONDS", "MAX_VALUE_BYTES", "secret_values", "without_waiting"]

MAX_VALUE_BYTES: Final = 1 << 20
COMMAND_SECONDS: Final = 60.0
END_SECONDS: Final = 0.2  # after so long it is asked for again whether anybody still waits
START_SECONDS: Final = 10.0  # a thread that was not begun by then, since a signal came first, never will be


def secret_values(
    sources: Mapping[str, SecretSource], *, folder: str, may_run: bool, given_up: int | None = None
) -> dict[str, bytes]:
    """The values of secrets by name. Paths of files are relative to `folder`, where commands run, too.

    Blocks until they are there: a command has `COMMAND_SECONDS`, nothing on its stdin, and no terminal to ask at; what it writes
    to stderr goes to this process's. It is killed, with what it started, when its time is over or this is interrupted. `may_run`
    says whether commands may run at all: not those of a settings file that the user has not named (`Loaded.named`), since an
    agent could have written it. `given_up` is the reading end of a pipe; once the other is closed, nothing is waited for any
    more, neither a command nor who would write into a FIFO.

    Raises `SnapshotError` `INVALID_REQUEST` for a value that cannot be had, is empty, larger than `MAX_VALUE_BYTES`, or too short
    to be looked for. Its words hold nothing of a value, a command, or what a command wrote.
    """
    return {name: _value(name, source, folder, may_run, given_up) for name, source in sources.items()}


def without_waiting(source: SecretSource, *, folder: str) -> bool:
    """Whether the value can be asked for at once: no command has to run, and no other program has to write it."""
    return source.command is None and (source.file is None or _is_file_or_absent(_path(source.file, folder)))


def _path(file: str, folder: str) -> str:
    return os.path.join(folder, os.path.expanduser(file))


def _is_file_or_absent(path: str) -> bool:
    return os.path.isfile(path) or not os.path.exists(path)


def _value(name: str, source: SecretSource, folder: str, may_run: bool, given_up: int | None) -> bytes:
    checked_name(name, "a secret")
    if source.env is not None:
        value = _from_environment(name, source.env)
    elif source.file is not None:
        value = _without_line_break(_from_file(name, _path(source.file, folder), given_up))
    elif source.command is not None:
        value = _without_line_break(_from_command(name, source.command, folder, may_run, given_up))
    else:
        raise _invalid(f"Nothing says where secret '{name}' comes from.", "Name one of env, file and command.")
    _check_length(name, value)
    return value


def _from_environment(name: str, variable: str) -> bytes:
    value = os.environb.get(os.fsencode(variable))
    if value is None:
        # The variable is not named unless it is called as the secret: it could be a value in the wrong place.
        which = f"The environment variable {name}" if variable == name else f"The environment variable of secret '{name}'"
        raise _invalid(f"{which} is not set.", "Set it; --secret-env and env take a variable's name, not a value.")
    return value


def _from_file(name: str, path: str, given_up: int | None) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO is waited for when it is read
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                with open(descriptor, "rb", closefd=False) as file:
                    value = file.read(MAX_VALUE_BYTES + 1)
            else:
                value = _all_of(name, descriptor, None, given_up)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no path"
        raise _invalid(f"The file of secret '{name}', {printable(path)}, cannot be read: {reason}.", "") from None
    _check_size(name, len(value))
    return value


def _without_line_break(value: bytes) -> bytes:
    """As files and programs end what they hold."""
    return value.removesuffix(b"\n").removesuffix(b"\r") if value.endswith(b"\n") else value


def _check_size(name: str, size: int) -> None:
    if size > MAX_VALUE_BYTES:
        raise _invalid(f"The value of secret '{name}' is larger than {MAX_VALUE_BYTES >> 20} MiB.", "")


def _check_length(name: str, value: bytes) -> None:
    from .redaction import MIN_SECRET_BYTES

    if len(value.strip()) < MIN_SECRET_BYTES:
        raise _invalid(
            f"The value of secret '{name}' has less than {MIN_SECRET_BYTES} bytes and would be found everywhere.",
            "There is no option to take it nevertheless: leave it out.",
        )


def _from_command(name: str, written: str | Sequence[str], folder: str, may_run: bool, given_up: int | None) -> bytes:
    words = _words(name, written)
    if not may_run:
        raise _invalid(
            f"Secret '{name}' comes from a command in a settings file that was found, not named; it is not run.",
            "If you trust the file, name it with --config.",
        )
    deadline = time.monotonic() + COMMAND_SECONDS
    command = _Command(words, folder)
    try:
        process = command.start()
        assert process.stdout is not None
        value = _all_of(name, process.stdout.fileno(), deadline, given_up)
        code = _end_of(name, process, deadline, given_up)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its words are not valid"
        raise _invalid(f"The command of secret '{name}' cannot be started: {reason}.", "") from None
    finally:
        command.stop()  # after an interruption too: none is left behind
    if code != 0:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise _invalid(f"The command of secret '{name}' {how}.", "What it wrote to stderr, if anything, stands above.")
    if not value:
        raise _invalid(f"The command of secret '{name}' wrote nothing to stdout.", "")
    return value


class _Command:
    """A command that is started on a thread of its own: a signal, which is handled on the main thread, cannot end the start half
    way, with a command that runs and is not known."""

    def __init__(self, words: list[str], folder: str) -> None:
        self._words = words
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._error: Exception | None = None
        self._is_decided = threading.Event()

    def start(self) -> "subprocess.Popen[bytes]":
        """The running command. Raises what starting it raised."""
        threading.Thread(target=self._start, daemon=True).start()
        self._is_decided.wait()
        if self._process is None:
            assert self._error is not None
            raise self._error
        return self._process

    def _start(self) -> None:
        import subprocess

        try:
            self._process = subprocess.Popen(
                self._words,
                cwd=self._folder or None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,  # so that what it starts can be ended with it
            )
        except (OSError, ValueError) as error:
            self._error = error
        finally:
            self._is_decided.set()

    def stop(self) -> None:
        """Kill it, and what it started, unless it has ended."""
        self._is_decided.wait(START_SECONDS)
        if self._process is not None:
            with self._process:
                if self._process.returncode is None:  # not waited for, so that its number is still that of the group
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self._process.pid, signal.SIGKILL)


def _words(name: str, command: str | Sequence[str]) -> list[str]:
    import shlex

    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError:
        raise _invalid(f"The command of secret '{name}' has a quote without its other one.", "") from None
    if not words or not words[0]:
        raise _invalid(f"The command of secret '{name}' is empty.", "")
    return words


def _all_of(name: str, descriptor: int, deadline: float | None, given_up: int | None) -> bytes:
    """All that comes out of a pipe."""
    value = bytearray()
    while _is_ready(name, descriptor, deadline, given_up):
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return bytes(value)
        value += piece
        _check_size(name, len(value))
    raise _too_slow(name)


def _is_ready(name: str, descriptor: int | None, deadline: float | None, given_up: int | None) -> bool:
    """Wait until there is something to read; False when the time is over."""
    poll = select.poll()
    for each in (descriptor, given_up):
        if each is not None:
            poll.register(each, select.POLLIN)
    left = None if deadline is None else max(deadline - time.monotonic(), 0) * 1000
    ready = {each for each, _ in poll.poll(left)}
    if given_up in ready:
        raise _invalid(f"Secret '{name}' was not waited for.", "")
    return bool(ready)


def _end_of(name: str, process: "subprocess.Popen[bytes]", deadline: float, given_up: int | None) -> int:
    """The exit code of a command that has closed its stdout."""
    import subprocess

    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left, END_SECONDS))
        _is_ready(name, None, time.monotonic(), given_up)
    raise _too_slow(name)


def _too_slow(name: str) -> SnapshotError:
    return _invalid(
        f"The command of secret '{name}' took longer than {COMMAND_SECONDS:g} seconds.",
        "It gets no input: see that it asks nothing.",
    )


def _invalid(message: str, hint: str) -> SnapshotError:
    return SnapshotError(message, code=Code.INVALID_REQUEST, hint=hint)
