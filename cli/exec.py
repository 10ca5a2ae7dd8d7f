"""Commands in sandboxes: `exec`."""

import asyncio
import os
import select
import stat
import sys
import traceback
from typing import Annotated, Any, Final

import typer

from snapcore.durations import parse_duration
from snapcore.errors import Code, SnapcoreError

from .app import USAGE_ERROR, Command
from .exec_job import Job
from .options import Label, SecretCommand, SecretEnv, SecretFile, Wait
from .output import print_error, print_system_error
from .runtime import Invocation, UsageError, check_wait, command

__all__ = ["ExecCommand", "exec_"]

NOT_RUN: Final = 125  # of snapcore itself, as `env`, `timeout` and `docker exec` have it
TIMED_OUT: Final = 124
MAX_STDIN: Final = 16 << 20
LOOK_SECONDS: Final = 0.2
PIECE: Final = 1 << 20
WORD: Final = "--command-word"

EXAMPLES: Final = {
    "exec": (
        "snapcore exec ./workspace -- ls -l",
        "# with a checkpoint to go back to, recorded in the log of a thread",
        "snapcore exec ./workspace -t thread-1 --before -- sh -c 'rm -rf build'",
        "# from a known state, and keep what comes of it; then once more in the same sandbox",
        "snapcore exec ./workspace -t thread-1 --restore label:after-install --checkpoint -- touch built",
        "snapcore exec --thread thread-1 --timeout 15min -- ls",
        "snapcore log thread-1",
        "# a secret in the command's environment, and nowhere else",
        "snapcore exec docker://my-container/workspace --secret-env GITHUB_TOKEN -- sh -c 'echo ${#GITHUB_TOKEN}'",
    )
}


class ExecCommand(Command):
    """A command that takes another's words, as they are, after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read what stands before the first `--`, and keep what follows."""
        end = args.index("--") if "--" in args else len(args)
        words = [part for word in args[end + 1 :] for part in (WORD, f"={word}")]  # none is empty, which is refused elsewhere
        try:
            return super().parse_args(ctx, [*args[:end], *words])
        except USAGE_ERROR as error:
            error.exit_code = NOT_RUN
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What follows the command's name in the line that says how to use it."""
        return [*super().collect_usage_pieces(ctx), "-- COMMAND [ARG]..."]


@command
async def exec_(
    invocation: Invocation,
    *,
    sandbox: Annotated[
        str | None,
        typer.Argument(metavar="SANDBOX", help="A folder, or another sandbox's address; else the one of the thread."),
    ] = None,
    thread: Annotated[
        str | None,
        typer.Option(
            "--thread", "-t", envvar="SNAPCORE_THREAD", metavar="THREAD", help="The thread in whose log it is recorded."
        ),
    ] = None,
    restore: Annotated[
        str | None, typer.Option("--restore", metavar="WHICH", help="Restore this checkpoint of the thread first.")
    ] = None,
    before: Annotated[bool, typer.Option("--before", help="A checkpoint first, unless nothing has changed.")] = False,
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="A checkpoint afterwards, when the command did well.")] = False,
    label: Label = None,
    always: Annotated[bool, typer.Option("--always", help="The checkpoint afterwards also when the command failed.")] = False,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="The step that the work belongs to.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            "-e",
            metavar="NAME[=VALUE]",
            help="A variable for the command, by itself with the value that it has here. Repeatable.",
        ),
    ] = None,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    secret_command: SecretCommand = None,
    cwd: Annotated[
        str | None, typer.Option("--cwd", "-C", metavar="DIR", help="Where it runs, from the sandbox's folder.")
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", "-u", metavar="USER", help="Who runs it, where that can be chosen.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="End it after this time: 90s, 15min; ends with 124.")
    ] = None,
    no_stdin: Annotated[bool, typer.Option("--no-stdin", help="Pass nothing on from stdin.")] = False,
    no_record: Annotated[bool, typer.Option("--no-record", help="Leave the thread's log alone.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Also when a session has not let go of the thread: its process is gone.")
    ] = False,
    wait: Wait = None,
    words: Annotated[list[str] | None, typer.Option(WORD, hidden=True)] = None,
) -> int:
    """Run a command in a sandbox; what it writes comes as it is, and its exit code is this one's.

    With a thread, it is recorded in the thread's log, and checkpoints are taken before or after it. Secrets are passed to the
    command as variables, and taken out of all that is stored.
    """
    try:
        thread = invocation.effective("thread").value
        if not words:
            raise UsageError("There is no command.", hint="It follows two hyphens: snapcore exec ./workspace -- ls -l")
        if thread is None:
            options = {"--restore": restore, "--before": before, "--checkpoint": checkpoint, "--label": label, "--step": step}
            for name, given in {**options, "--always": always, "--take-over": take_over}.items():
                if given not in (None, False):
                    raise UsageError(f"{name} needs a thread.", hint="Add --thread.")
        if sandbox is None and (thread is None or no_record):
            raise UsageError("There is no sandbox.", hint="Name a folder or an address, or a thread that has one: --thread.")
        if always and not (checkpoint or label):
            raise UsageError("--always says when a checkpoint is made.", hint="Add --checkpoint.")
        if step is not None and not 0 <= step < 2**63:
            raise UsageError("--step takes a number that is not negative, and below 2^63.")
        if label is not None:  # the checkpoint that it is for is made when the command has run
            from snapcore.model import validate_text

            validate_text(label, "A label", code=Code.INVALID_ENTRY)
        check_wait(wait)
        secrets = invocation.secrets(secret_env, secret_file, secret_command)
        named = {each.partition("=")[0] for given in (secret_env, secret_file, secret_command) for each in given or ()}
        passed = {name: os.fsdecode(value) for name, value in (secrets or {}).items() if name in named}
        job = Job(
            invocation,
            sandbox,
            thread,
            words=[word[1:] for word in words],
            options={
                "environment": _environment(env) | passed,
                "cwd": cwd or ".",  # without one, it would start elsewhere where an address has a typing error
                "user": user,
                "timeout": None if timeout is None else parse_duration(timeout, "--timeout"),
                "stdin": b"" if no_stdin else await _stdin(),
            },
            secrets=secrets,
            restore=restore,
            before=before,
            after=checkpoint or label is not None,
            label=label,
            always=always,
            step=step,
            record=not no_record,
            take_over=take_over,
            wait=wait,
        )
        return await job.run()
    except SnapcoreError as error:
        if invocation.debug:
            traceback.print_exc()
        print_error(error, as_json=invocation.json)
        return TIMED_OUT if error.code is Code.EXEC_TIMEOUT else NOT_RUN
    except BrokenPipeError:
        raise
    except OSError as error:
        if invocation.debug:
            traceback.print_exc()
        print_system_error(error, as_json=invocation.json)
        return NOT_RUN


exec_.command_class = ExecCommand  # type: ignore[attr-defined]


def _environment(given: list[str] | None) -> dict[str, str]:
    """The variables that `--env` names."""
    found: dict[str, str] = {}
    for each in given or ():
        name, separator, value = each.partition("=")
        if not separator:
            if name not in os.environ:
                raise UsageError(f"The environment variable {name} is not set.", hint="--env NAME=VALUE gives it a value.")
            value = os.environ[name]
        found[name] = value
    return found


async def _stdin() -> bytes:
    """All that comes on stdin, unless it is a terminal: a sandbox takes a command's input as a whole."""
    try:
        fd = sys.stdin.fileno()
        if os.isatty(fd) or stat.S_ISDIR(os.fstat(fd).st_mode):
            return b""
    except (OSError, ValueError):  # it is closed, or no file
        return b""
    data = bytearray()
    while True:
        # looked at now and then only, so that an interrupted command need not wait for whoever writes
        ready, _, _ = await asyncio.to_thread(select.select, [fd], [], [], LOOK_SECONDS)
        if not ready:
            continue
        piece = os.read(fd, PIECE)
        if not piece:
            return bytes(data)
        data += piece
        if len(data) > MAX_STDIN:
            raise UsageError(
                f"stdin has more than {MAX_STDIN >> 20} MiB, which is what a command can be given.",
                hint="Put the data into a file of the sandbox; --no-stdin passes nothing on.",
            )
