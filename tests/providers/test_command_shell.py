"""A shell behind a command of this host: bytes in and out as streams, and nothing left at work."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapcore.errors import Code, ProviderError
from snapcore.providers.command_shell import CommandShell
from snapcore.providers.shell_tools import quoted, run

HERE = CommandShell([], "here")


async def output_of(shell: CommandShell, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> tuple[bytes, int, bytes]:
    async with shell.pipe(script, stdin) as pipe:
        out = b"".join([piece async for piece in pipe.stdout()])
        result = await pipe.wait()
    return out, result.exit_code, result.stderr


async def test_every_byte_goes_in_and_comes_out_unchanged() -> None:
    data = bytes(range(256)) * 20_000

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 70_001):
            yield data[at : at + 70_001]

    for stdin in (data, pieces()):
        assert await output_of(HERE, "cat", stdin) == (data, 0, b"")


async def test_input_output_and_errors_do_not_wait_for_each_other() -> None:
    """Each is larger than any pipe holds, and the script takes them one after the other."""
    script = "head -c 3000000 /dev/zero >&2; head -c 3000000 /dev/zero; cat >/dev/null; exit 7"
    out, code, stderr = await output_of(HERE, script, bytes(3_000_000))
    assert (len(out), code, len(stderr)) == (3_000_000, 7, 8192)


async def test_input_that_nobody_takes_is_no_error() -> None:
    assert await output_of(HERE, "echo done", bytes(3_000_000)) == (b"done\n", 0, b"")


async def test_an_error_of_the_input_is_raised_in_the_end() -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"begun"
        raise ProviderError("The source is gone.")

    with pytest.raises(ProviderError, match="The source is gone"):
        await output_of(HERE, "cat", failing())


async def test_leaving_early_ends_all_that_was_started(tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! >{tmp_path}/pid; cat /dev/zero"
    async with HERE.pipe(script) as pipe:
        async for _ in pipe.stdout():
            break
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_a_cancelled_caller_leaves_nothing_at_work(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def use() -> None:
        async with HERE.pipe("echo $$; exec sleep 1000") as pipe:
            async for piece in pipe.stdout():
                (tmp_path / "pid").write_bytes(piece)
                started.set()

    task = asyncio.create_task(use())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


async def test_what_a_login_script_prints_is_no_output() -> None:
    shell = CommandShell(["sh", "-c", 'echo Welcome; printf "uid=5\nno end"; exec "$@"', "x"], "x")
    assert await output_of(shell, "cat; exit 3", b"own\n") == (b"own\n", 3, b"")


async def test_why_a_script_did_not_begin_is_told() -> None:
    for prefix, code, said in (
        (["sh", "-c", 'exec "$@" </dev/null', "x"], Code.NOT_CAPABLE, "no input"),
        (["sh", "-c", "echo Error: No such container: box >&2; exit 1", "x"], Code.NO_SANDBOX, "No such container"),
        (["sh", "-c", "echo ssh: no route to host >&2; exit 255", "x"], Code.SANDBOX_UNAVAILABLE, "no route"),
        (["sh", "-c", "exit 127", "x"], Code.NOT_CAPABLE, "`sh`"),
    ):
        with pytest.raises(ProviderError, match=said) as caught:
            await output_of(CommandShell(prefix, "x"), "echo own", b"input")
        assert caught.value.code == code


async def test_what_talks_without_end_and_is_no_shell_is_told_so() -> None:
    with pytest.raises(ProviderError) as caught:
        await output_of(CommandShell(["sh", "-c", "exec cat /dev/zero", "x"], "x"), "echo never")
    assert caught.value.code == Code.NOT_CAPABLE


@pytest.mark.parametrize("sh", ["dash", "bash", "busybox"])
async def test_any_name_is_one_word_of_a_script(sh: str) -> None:
    program = shutil.which(sh)
    if program is None:
        pytest.skip(f"{sh} is not installed")
    name = bytes(range(1, 256)) + b"'\\''$(x)`y`\n"
    shell = CommandShell([], "x") if sh != "busybox" else CommandShell([program], "x")
    script = f"LC_ALL=C; export LC_ALL; printf %s {quoted(name)}"
    assert (await output_of(shell, script))[0] == name
    # a shell of another kind, and one that joins its arguments to hand them on
    assert (
        await output_of(
            CommandShell([program, *(["sh"] if sh == "busybox" else []), "-c", 'eval "$1"', "x"], "x", quoted=True), script
        )
    )[0] == name


def test_a_name_with_a_nul_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        quoted(b"a\0b")


async def test_how_a_script_failed_is_told_without_control_characters() -> None:
    with pytest.raises(ProviderError) as caught:
        await run(HERE, "printf 'first\\nno \\033[31mroute\\n' >&2; exit 255")
    assert caught.value.code == Code.SANDBOX_UNAVAILABLE
    assert caught.value.retryable
    assert "no \\x1b[31mroute" in str(caught.value)


async def test_more_output_than_there_can_be_is_refused() -> None:
    with pytest.raises(ProviderError) as caught:
        await run(HERE, "cat /dev/zero", max_output=1000)
    assert caught.value.code == Code.SANDBOX_UNAVAILABLE


async def test_what_is_run_has_no_terminal_to_ask_at() -> None:
    assert (await output_of(HERE, "ps -o sid= -p $$ | tr -d ' '; echo $$"))[0].split()[0] != str(os.getsid(0)).encode()
