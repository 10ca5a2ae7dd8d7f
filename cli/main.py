"""The entry point of the `snapcore` command."""

import contextlib
import gc
import importlib
import os
import signal
import sys

__all__ = ["run"]

_BROKEN_PIPE = 128 + signal.SIGPIPE
_INTERRUPTED = 128 + signal.SIGINT


def run() -> None:
    """Run the command named in `sys.argv`, and end the process with its exit code."""
    # Loading modules makes much that stays and nothing that goes: the collector would look through it again and again.
    # A command turns it on again once its modules are loaded.
    gc.disable()
    # While modules are loaded nothing is held that would have to be given up: an interruption ends it at once, and quietly.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:3] == ["cron", "run"]:  # which listens to SIGHUP; systemd does not start again what that has ended
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
    _open_missing_streams()
    if sys.argv[1:] == ["--version"]:  # without Typer, whose modules would take most of the time
        _print_version()
    from .later import load_when_used

    # SQLAlchemy imports it, and with it email and zipfile, to look for other packages' dialects, of which there are none here.
    load_when_used(importlib, "metadata")
    from .app import app

    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        app()
    except SystemExit as done:
        # Typer turns a broken pipe into code 1.
        _leave(_BROKEN_PIPE if isinstance(done.__context__, BrokenPipeError) else done.code)
    except BrokenPipeError:
        _leave(_BROKEN_PIPE)
    except KeyboardInterrupt:
        _leave(_INTERRUPTED)
    except OSError as error:
        # From printing a help page or a usage error, whose code stays; a command reports its own.
        _tell(error)
        _leave(getattr(error.__context__, "exit_code", 1))
    except Exception as error:  # noqa: BLE001  # whatever nobody foresaw is told here, and nowhere else
        _tell_unforeseen(error)
        _leave(1)


def _print_version() -> None:
    from .version import version_line

    try:
        sys.stdout.write(f"{version_line()}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _leave(_BROKEN_PIPE)
    except OSError as error:
        _tell(error)
        _leave(1)
    _leave(0)


def _open_missing_streams() -> None:
    """Put the null device in the place of each standard stream that was closed by whoever started this process: what is
    printed is lost then, and no file opened later takes the stream's number."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for as long as the process lives
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives


def _tell(error: OSError) -> None:
    from .output import system_error_line

    with contextlib.suppress(OSError):  # stderr may be what failed
        sys.stderr.write(system_error_line(error))


def _tell_unforeseen(error: Exception) -> None:
    from .output import print_unforeseen

    with contextlib.suppress(OSError):
        if "--debug" in sys.argv:
            import traceback

            traceback.print_exception(error)
        print_unforeseen(error, as_json="--json" in sys.argv)


def _leave(code: str | int | None) -> None:
    """End the process without taking the interpreter apart, which takes 25 ms: stores and threads are closed by now."""
    if isinstance(code, str):
        sys.exit(code)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = code or _BROKEN_PIPE
    except OSError as error:
        if not code:
            _tell(error)
        code = code or 1
    try:
        sys.stderr.flush()
    except OSError:
        code = code or 1
    os._exit(code or 0)
