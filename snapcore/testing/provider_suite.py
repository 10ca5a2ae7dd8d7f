"""What every provider must do, as tests to subclass.

    class TestMyProvider(ProviderTests):
        def make_provider(self, *, on_create: Sequence[Hook] = (), on_open: Sequence[Hook] = ()) -> SandboxProvider:
            return MyProvider(on_create=on_create, on_open=on_open)

What the provider's `abilities` do not declare is not asked of it, besides that it says so before anything is touched. A provider
that makes no sandboxes gives `existing` instead. A sandbox needs no more than `sh` with `cat`, `printf`, `sleep` and `head`.
"""

import asyncio
import hashlib
import os
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

import snapcore
from snapcore.errors import Code, ProviderError, SnapcoreError, SnapshotError
from snapcore.sandboxes import Abilities, Binding, ExecResult, Hook, SandboxHandle, SandboxProvider, SandboxSpec

from .trees import compare_trees, make_tree

__all__ = ["ProviderTests"]

Attempt = Callable[[], Awaitable[object]]

ALL_BYTES = bytes(range(256)) * 300
ODD_WORDS = ["", " ", "a b", "$HOME", "`id`", "it's", '"', "\\", "*", "-n", "new\nline", "naïve 文", "\t;&|<>(){}!#~"]
ODD_NAMES = ["with space", "it's", "new\nline", "naïve 文", "-rf", "a$HOME`id`*?", "x" * 200, "\\n", '"']


@pytest.mark.asyncio
class ProviderTests:
    """Subclass this, named `Test...`, and give `make_provider`, and `existing` where the provider makes no sandboxes."""

    other_user: str | None = None
    """A user of the sandbox, not the one that commands run as by default; None where `exec` cannot change the user."""

    image: str | None = None
    """What `SandboxSpec.image` has to be, for providers that need one."""

    whole_uploads: bool = True
    """Whether an upload whose source fails leaves the file as it was."""

    patience: float = 60.0
    """Seconds that an awaited change may take at most."""

    def make_provider(self, *, on_create: Sequence[Hook] = (), on_open: Sequence[Hook] = ()) -> SandboxProvider:
        """A new provider object, as another process would make it."""
        pytest.fail("A subclass has to say how to make its provider.")

    def spec(self, **fields: Any) -> SandboxSpec:
        """A sandbox to be made."""
        return SandboxSpec(image=self.image, **fields)

    async def existing(self) -> Binding:
        """A sandbox with an empty workspace, for providers that make none."""
        pytest.fail("A subclass has to say which sandbox to open.")

    @pytest.fixture
    def provider(self) -> SandboxProvider:
        return self.make_provider()

    @pytest.fixture
    def abilities(self, provider: SandboxProvider) -> Abilities:
        return provider.abilities

    @pytest_asyncio.fixture
    async def handle(self, provider: SandboxProvider) -> AsyncIterator[SandboxHandle]:
        """A sandbox with an empty workspace; one that was made is destroyed in the end."""
        can = provider.abilities
        handle = await provider.create(self.spec()) if can.create else await provider.open(await self.existing())
        try:
            yield handle
        finally:
            await handle.close()
            if can.destroy:
                await provider.destroy(handle.binding)

    # ---- what it says of itself

    async def test_a_provider_and_its_handles_are_what_the_contracts_say(
        self, provider: SandboxProvider, handle: SandboxHandle
    ) -> None:
        assert provider.name
        assert isinstance(provider.abilities, Abilities)
        assert isinstance(handle, SandboxHandle)
        assert handle.binding.provider == provider.name
        assert handle.binding.sandbox_id
        assert handle.workspace_root.startswith("/")
        assert handle.binding.workspace_root == handle.workspace_root
        assert handle.workspace().root == handle.workspace_root
        assert handle.workspace().sandbox_id == handle.sandbox_id

    async def test_what_a_provider_lacks_is_refused_before_anything_is_touched(
        self, provider: SandboxProvider, handle: SandboxHandle, abilities: Abilities
    ) -> None:
        await _put(handle, "kept", b"kept")
        hooks = Calls()
        counting = self.make_provider(on_create=[hooks.note("create")], on_open=[hooks.note("open")])
        attempts: dict[str, Attempt] = {
            "create": lambda: counting.create(self.spec()),
            "destroy": lambda: counting.destroy(handle.binding),
            "pause": lambda: counting.pause(handle),
            "snapshot": lambda: counting.snapshot(handle),
        }
        for ability, attempt in attempts.items():
            if not getattr(abilities, ability):
                with pytest.raises(ProviderError) as caught:
                    await attempt()
                assert caught.value.code == Code.NOT_CAPABLE
        if abilities.create and not abilities.snapshot:
            with pytest.raises(ProviderError) as caught:
                await counting.create(self.spec(snapshot="some-snapshot"))
            assert caught.value.code == Code.NOT_CAPABLE
        assert hooks.calls == []
        assert await _get(handle, "kept") == b"kept"

    # ---- bindings

    async def test_a_binding_is_json_and_finds_the_sandbox_again(self, handle: SandboxHandle) -> None:
        await _put(handle, "file", b"still here")
        text = msgspec.json.encode(handle.binding)
        again = msgspec.json.decode(text, type=Binding)
        assert again == handle.binding
        await handle.close()
        opened = await self.make_provider().open(again)
        try:
            assert opened.sandbox_id == handle.sandbox_id
            assert opened.workspace_root == handle.workspace_root
            assert opened.binding == again
            assert await _get(opened, "file") == b"still here"
        finally:
            await opened.close()

    async def test_two_open_handles_see_one_sandbox(self, handle: SandboxHandle) -> None:
        other = await self.make_provider().open(handle.binding)
        await _put(other, "file", b"from the other")
        await other.close()
        assert await _get(handle, "file") == b"from the other"

    async def test_environment_values_are_in_no_binding_id_or_repr(self, provider: SandboxProvider, abilities: Abilities) -> None:
        if not abilities.create:
            return
        secret = secrets.token_hex(16)
        spec = self.spec(environment={"GIVEN": secret})
        handle = await provider.create(spec)
        try:
            if abilities.exec:
                assert (await handle.exec('printf %s "$GIVEN"')).stdout == secret.encode()
            shown = [msgspec.json.encode(handle.binding).decode(), handle.sandbox_id, handle.workspace().sandbox_id]
            shown += [repr(handle), repr(provider), repr(spec), str(handle), repr(handle.binding)]
            assert [text for text in shown if secret in text] == []
        finally:
            await handle.close()
            await provider.destroy(handle.binding)

    async def test_an_unknown_sandbox_cannot_be_opened(self, provider: SandboxProvider, abilities: Abilities) -> None:
        if not (abilities.create and abilities.destroy):
            return
        handle = await provider.create(self.spec())
        await handle.close()
        await provider.destroy(handle.binding)
        with pytest.raises(ProviderError) as caught:
            await self.make_provider().open(handle.binding)
        assert caught.value.code == Code.NO_SANDBOX
        assert not caught.value.retryable

    # ---- creating and destroying

    async def test_a_new_sandbox_has_an_empty_workspace_of_its_own(
        self, provider: SandboxProvider, handle: SandboxHandle, abilities: Abilities
    ) -> None:
        names = [found.path async for batch in handle.workspace().scan(_Everything()) for found in batch]
        assert names == [b""]
        if not abilities.create:
            return
        other = await provider.create(self.spec())
        try:
            assert other.sandbox_id != handle.sandbox_id
            await _put(other, "file", b"of the other")
            with pytest.raises(FileNotFoundError):
                await _get(handle, "file")
        finally:
            await other.close()
            await provider.destroy(other.binding)

    async def test_a_destroyed_sandbox_is_gone_for_every_handle(self, provider: SandboxProvider, abilities: Abilities) -> None:
        if not (abilities.create and abilities.destroy):
            return
        handle = await provider.create(self.spec())
        other = await self.make_provider().open(handle.binding)
        await provider.destroy(handle.binding)
        for each in (handle, other):
            for attempt in _uses(each, abilities):
                with pytest.raises(ProviderError) as caught:
                    await attempt()
                assert caught.value.code == Code.NO_SANDBOX
            with pytest.raises(SnapcoreError):
                [batch async for batch in each.workspace().scan(_Everything())]
            await each.close()
        await provider.destroy(handle.binding)
        await self.make_provider().destroy(handle.binding)

    # ---- hooks

    async def test_hooks_run_in_order_with_an_open_handle(self, abilities: Abilities) -> None:
        calls = Calls()
        provider = self.make_provider(
            on_create=[calls.note("create 1"), calls.note("create 2")], on_open=[calls.note("open 1"), calls.note("open 2")]
        )
        handle = await provider.create(self.spec()) if abilities.create else await provider.open(await self.existing())
        try:
            opened = ["open 1", "open 2"]
            made = ["create 1", "create 2"] if abilities.create else []
            assert calls.calls == [*made, *opened]
            assert {seen.sandbox_id for seen in calls.handles} == {handle.sandbox_id}
            again = await provider.open(handle.binding)
            assert calls.calls == [*made, *opened, *opened]
            await again.close()
        finally:
            await handle.close()
            if abilities.destroy:
                await provider.destroy(handle.binding)

    async def test_a_hook_can_use_the_sandbox(self, handle: SandboxHandle) -> None:
        async def check_out(opened: SandboxHandle) -> None:
            await _put(opened, "from-a-hook", b"hello")

        opened = await self.make_provider(on_open=[check_out]).open(handle.binding)
        assert await _get(opened, "from-a-hook") == b"hello"
        await opened.close()

    @pytest.mark.parametrize("kind", ["on_create", "on_open"])
    async def test_a_failing_hook_destroys_what_was_made(self, abilities: Abilities, kind: str) -> None:
        if not (abilities.create and abilities.destroy):
            return
        calls = Calls()
        hooks = [calls.note("before"), calls.fail("the hook's own words"), calls.note("after")]
        provider = self.make_provider(on_create=hooks) if kind == "on_create" else self.make_provider(on_open=hooks)
        with pytest.raises(HookError, match="the hook's own words"):
            await provider.create(self.spec())
        assert calls.calls == ["before", "fail"]
        with pytest.raises(ProviderError) as caught:
            await self.make_provider().open(calls.handles[0].binding)
        assert caught.value.code == Code.NO_SANDBOX

    async def test_a_failing_hook_closes_what_was_opened(self, handle: SandboxHandle) -> None:
        calls = Calls()
        provider = self.make_provider(on_open=[calls.fail("the hook's own words"), calls.note("after")])
        with pytest.raises(HookError, match="the hook's own words"):
            await provider.open(handle.binding)
        assert calls.calls == ["fail"]
        with pytest.raises(ProviderError):
            await _put(calls.handles[0], "file", b"")
        await _put(handle, "file", b"the sandbox lives on")

    # ---- commands

    async def test_arguments_arrive_as_they_are(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        result = await handle.exec(["sh", "-c", 'printf "<%s>" "$@"', "sh", *ODD_WORDS])
        assert result == ExecResult(0, "".join(f"<{word}>" for word in ODD_WORDS).encode())

    async def test_a_text_is_run_by_a_shell(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        result = await handle.exec('x="it\'s"; printf \'%s\\n\' "$x" | cat; printf oops >&2; exit 3')
        assert result == ExecResult(3, b"it's\n", b"oops")

    async def test_long_commands_arrive_whole(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        words = [f"{number:04d}" * 20 for number in range(1000)]
        result = await handle.exec(["printf", "%s\n", *words])
        assert result.exit_code == 0
        assert result.stdout.decode().split() == words

    async def test_any_bytes_go_in_and_come_out(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.binary_pipes:
            return
        assert await handle.exec(["cat"], stdin=ALL_BYTES) == ExecResult(0, ALL_BYTES)
        assert await handle.exec(["sh", "-c", "cat >&2"], stdin=ALL_BYTES) == ExecResult(0, b"", ALL_BYTES)

    async def test_large_input_and_output(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.binary_pipes:
            return
        data = os.urandom(1 << 20) * 9
        result = await handle.exec(["cat"], stdin=data, max_output=16 << 20)
        assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()
        assert not result.truncated

    async def test_input_that_is_not_read_is_no_error(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        assert (await handle.exec("exit 4", stdin=bytes(1 << 20))).exit_code == 4

    async def test_a_command_without_input_sees_its_end(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        assert await handle.exec(["cat"], timeout=self.patience) == ExecResult(0)

    @pytest.mark.parametrize("code", [0, 1, 2, 42, 255])
    async def test_exit_codes_come_back(self, handle: SandboxHandle, abilities: Abilities, code: int) -> None:
        if not abilities.exec:
            return
        assert (await handle.exec(f"exit {code}")).exit_code == code

    async def test_a_signal_shows_in_the_exit_code(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        assert (await handle.exec(["sh", "-c", "kill -KILL $$"])).exit_code in (137, 255)  # 255: a transport that is not told

    async def test_a_command_that_is_not_there_is_a_result(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        told: list[bytes] = []
        for command in (["snapcore-no-such-command"], "snapcore-no-such-command", ["/no/such/command"]):
            told.clear()
            result = await handle.exec(command, on_output=lambda _, piece: told.append(piece))
            assert result.exit_code in (126, 127)
            assert b"".join(told) == result.stdout + result.stderr, "on_output sees all"

    async def test_commands_that_no_system_takes_are_refused(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        for command in ([], "", [""], ["printf", "a\0b"], "printf 'a\0b'"):
            with pytest.raises(SnapshotError) as caught:
                await handle.exec(command)
            assert caught.value.code == Code.INVALID_REQUEST
        for environment in ({"A=B": "x"}, {"": "x"}, {"A": "a\0b"}, {"A;true": "x"}):
            with pytest.raises(SnapshotError) as caught:
                await handle.exec(["true"], environment=environment)
            assert caught.value.code == Code.INVALID_REQUEST

    async def test_commands_run_where_they_are_told_to(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        for name in ODD_NAMES:
            folder = f"{handle.workspace_root}/{name}"
            assert (await handle.exec(["mkdir", "--", folder])).exit_code == 0
            result = await handle.exec("printf here > file && pwd", cwd=folder)
            assert result.exit_code == 0
            assert await _get(handle, f"{name}/file") == b"here"

    async def test_commands_run_in_the_workspace_root_by_default(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        assert (await handle.exec("printf here > file && mkdir folder")).exit_code == 0
        assert await _get(handle, "file") == b"here"
        assert (await handle.exec("printf here > file", cwd="folder")).exit_code == 0
        assert await _get(handle, "folder/file") == b"here"

    async def test_a_folder_that_is_not_there_is_a_result(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        assert (await handle.exec(["true"], cwd="missing")).exit_code in (126, 127)

    async def test_the_environment_is_set_and_never_left_behind(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        given = {f"GIVEN_{number}": word for number, word in enumerate(ODD_WORDS)}
        show = "".join(f'printf "<%s>" "$GIVEN_{number}";' for number in range(len(ODD_WORDS)))
        result = await handle.exec(show, environment=given)
        assert result.stdout == "".join(f"<{word}>" for word in ODD_WORDS).encode()
        assert (await handle.exec('printf "<%s>" "$GIVEN_2"')).stdout == b"<>"

    async def test_another_user_runs_a_command(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        if self.other_user is None:
            with pytest.raises(ProviderError) as caught:
                await handle.exec(["true"], user="snapcore-no-such-user")
            assert caught.value.code == Code.NOT_CAPABLE
            return
        before = (await handle.exec(["id", "-un"])).stdout.decode().strip()
        assert before != self.other_user
        assert (await handle.exec(["id", "-un"], user=self.other_user)).stdout.decode().strip() == self.other_user

    async def test_a_command_that_takes_too_long_is_ended(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        pid_file = f"{handle.workspace_root}/pid"
        script = f"echo $$ > {shlex.quote(pid_file)}; exec sleep 3000"
        with pytest.raises(ProviderError) as caught:
            await handle.exec(["sh", "-c", script], timeout=3.0)
        assert caught.value.code == Code.EXEC_TIMEOUT
        await self.until_gone(handle, (await _get(handle, "pid")).decode().strip())

    async def test_a_cancelled_command_is_ended(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        started = asyncio.Event()
        seen: list[bytes] = []

        def on_output(stream: str, piece: bytes) -> None:
            seen.append(piece)
            if b"\n" in piece:
                started.set()

        running = asyncio.create_task(handle.exec(["sh", "-c", "echo $$; exec sleep 3000"], on_output=on_output))
        await asyncio.wait_for(started.wait(), self.patience)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await self.until_gone(handle, b"".join(seen).decode().strip())

    async def until_gone(self, handle: SandboxHandle, pid: str) -> None:
        """Wait until a process has ended; one that nobody has waited for yet counts as ended."""
        assert pid.isdigit()
        script = f"kill -0 {pid} 2>/dev/null || exit 0; grep -q '^State:.Z' /proc/{pid}/status"
        async with asyncio.timeout(self.patience):
            while (await handle.exec(script)).exit_code:  # noqa: ASYNC110  # the sandbox has no way to tell
                await asyncio.sleep(0.05)

    async def test_output_beyond_the_limit_is_dropped_and_said(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        seen = {"stdout": 0, "stderr": 0}

        def on_output(stream: str, piece: bytes) -> None:
            seen[stream] += len(piece)

        write = "head -c 300000 /dev/zero; head -c 5000 /dev/zero >&2; exit 7"
        result = await handle.exec(write, max_output=1000, on_output=on_output)
        assert (result.exit_code, len(result.stdout), len(result.stderr), result.truncated) == (7, 1000, 1000, True)
        assert seen == {"stdout": 300_000, "stderr": 5000}
        whole = await handle.exec("head -c 1000 /dev/zero", max_output=1000)
        assert (len(whole.stdout), whole.truncated) == (1000, False)

    async def test_output_is_shown_while_the_command_runs(self, handle: SandboxHandle, abilities: Abilities) -> None:
        if not abilities.exec:
            return
        go = shlex.quote(f"{handle.workspace_root}/go")
        first = asyncio.Event()
        parts: list[tuple[str, bytes]] = []

        def on_output(stream: str, piece: bytes) -> None:
            parts.append((stream, piece))
            first.set()

        script = f"printf one; while [ ! -e {go} ]; do sleep 0.1 2>/dev/null || sleep 1; done; printf two >&2"
        running = asyncio.create_task(handle.exec(script, on_output=on_output, timeout=self.patience))
        await asyncio.wait_for(first.wait(), self.patience)
        assert parts == [("stdout", b"one")]
        await _put(handle, "go", b"")
        assert await running == ExecResult(0, b"one", b"two")
        assert parts == [("stdout", b"one"), ("stderr", b"two")]

    async def test_commands_and_transfers_run_side_by_side(self, handle: SandboxHandle, abilities: Abilities) -> None:
        async def one(number: int) -> None:
            data = b"%d " % number * 50_000
            await _put(handle, f"file-{number}", data)
            assert await _get(handle, f"file-{number}") == data
            if abilities.exec:
                file = shlex.quote(f"{handle.workspace_root}/file-{number}")
                assert (await handle.exec(f"head -c 4 {file}; exit {number}")) == ExecResult(number, data[:4])

        await asyncio.gather(*(one(number) for number in range(8)))

    # ---- transfers

    @pytest.mark.parametrize("data", [b"", b"x", ALL_BYTES, b"\n" * 3, bytes(5 << 20)], ids=["none", "one", "all", "lf", "5M"])
    async def test_bytes_go_up_and_come_down(self, handle: SandboxHandle, data: bytes) -> None:
        await _put(handle, "file", data)
        assert await _get(handle, "file") == data

    async def test_a_stream_goes_up_and_comes_down_in_pieces(self, handle: SandboxHandle) -> None:
        block = os.urandom(1 << 20)

        async def stream() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield block
            yield b""
            yield b"end"

        path = f"{handle.workspace_root}/large"
        await handle.upload(path, stream())
        digest, sizes = hashlib.sha256(), []
        async for piece in handle.download(path):
            digest.update(piece)
            sizes.append(len(piece))
        assert sum(sizes) == (40 << 20) + 3
        assert digest.digest() == hashlib.sha256(block * 40 + b"end").digest()
        assert max(sizes) <= 16 << 20

    async def test_an_upload_replaces_the_file_whole(self, handle: SandboxHandle) -> None:
        await _put(handle, "file", ALL_BYTES)
        await _put(handle, "file", b"short")
        assert await _get(handle, "file") == b"short"

    async def test_an_upload_that_fails_leaves_nothing_behind(self, handle: SandboxHandle) -> None:
        await _put(handle, "file", b"before")

        async def broken() -> AsyncIterator[bytes]:
            yield b"x" * 100_000
            raise HookError("the source broke")

        with pytest.raises(HookError, match="the source broke"):
            await handle.upload(f"{handle.workspace_root}/file", broken())
        if self.whole_uploads:
            assert await _get(handle, "file") == b"before"
        names = {found.path async for batch in handle.workspace().scan(_Everything()) for found in batch}
        assert names == {b"", b"file"}

    async def test_odd_names_go_up_and_come_down(self, handle: SandboxHandle) -> None:
        for name in ODD_NAMES:
            await _put(handle, name, name.encode())
        for name in ODD_NAMES:
            assert await _get(handle, name) == name.encode()
        names = {os.fsdecode(found.path) async for batch in handle.workspace().scan(_Everything()) for found in batch}
        assert names == {"", *ODD_NAMES}

    async def test_a_missing_file_is_a_file_not_found_error(self, handle: SandboxHandle) -> None:
        for name in ("missing", "missing/file"):
            with pytest.raises(FileNotFoundError):
                await _get(handle, name)

    async def test_a_folder_is_no_file(self, handle: SandboxHandle) -> None:
        with pytest.raises((OSError, SnapcoreError)):
            await _get(handle, ".")
        with pytest.raises((OSError, SnapcoreError)):
            await handle.upload(handle.workspace_root, b"x")

    async def test_paths_that_are_not_absolute_are_refused(self, handle: SandboxHandle) -> None:
        for path in ("file", "./file", "", "/tmp/a\0b"):
            with pytest.raises(SnapshotError) as caught:
                await handle.upload(path, b"x")
            assert caught.value.code == Code.INVALID_REQUEST
            with pytest.raises(SnapshotError) as caught:
                [piece async for piece in handle.download(path)]
            assert caught.value.code == Code.INVALID_REQUEST

    async def test_a_download_that_is_left_early_ends_cleanly(self, handle: SandboxHandle) -> None:
        await _put(handle, "large", bytes(8 << 20))
        pieces = handle.download(f"{handle.workspace_root}/large")
        assert await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]  # an async generator, as every `async def` with `yield` is
        assert await _get(handle, "large") == bytes(8 << 20)

    # ---- closing, pausing, snapshots

    async def test_a_closed_handle_does_nothing_more(self, handle: SandboxHandle, abilities: Abilities) -> None:
        await handle.close()
        await handle.close()
        for attempt in _uses(handle, abilities):
            with pytest.raises(ProviderError):
                await attempt()

    async def test_a_paused_sandbox_keeps_its_files(
        self, provider: SandboxProvider, handle: SandboxHandle, abilities: Abilities
    ) -> None:
        if not abilities.pause:
            return
        await _put(handle, "file", b"before the pause")
        await provider.pause(handle)
        with pytest.raises(ProviderError):
            await _put(handle, "file", b"")
        calls = Calls()
        opened = await self.make_provider(on_open=[calls.note("open")]).open(handle.binding)
        assert calls.calls == ["open"]
        assert await _get(opened, "file") == b"before the pause"
        await opened.close()

    async def test_a_native_snapshot_starts_another_sandbox(
        self, provider: SandboxProvider, handle: SandboxHandle, abilities: Abilities
    ) -> None:
        if not (abilities.snapshot and abilities.create):
            return
        await _put(handle, "file", b"in the snapshot")
        reference = await provider.snapshot(handle)
        await _put(handle, "file", b"changed since")
        other = await provider.create(SandboxSpec(snapshot=reference))
        try:
            assert await _get(other, "file") == b"in the snapshot"
            assert await _get(handle, "file") == b"changed since"
        finally:
            await other.close()
            await provider.destroy(other.binding)

    # ---- checkpoints

    async def test_a_checkpoint_goes_out_of_the_sandbox_and_back(self, handle: SandboxHandle, tmp_path: Path) -> None:
        local, copy = tmp_path / "tree", tmp_path / "copy"
        make_tree(local, files=40)
        policy = snapcore.FilePolicy.everything()
        can = handle.workspace().capabilities
        async with snapcore.open_repository("memory://") as repo:
            first = await repo.capture(str(local), thread_id="local", policy=policy)
            receipt = await repo.restore(handle, thread_id="local", verify="content")
            assert receipt is not None
            again = await repo.capture(handle, thread_id="there", policy=policy)
            if not receipt.differences:
                assert again.content_id == first.content_id
            await _put(handle, "made-since", b"x")
            await repo.capture(handle, thread_id="there", policy=policy)
            assert await repo.read_file(await repo.resolve("latest", "there"), b"made-since") == b"x"
            back = await repo.restore(handle, thread_id="there", checkpoint_id=again.id)
            assert back is not None
            assert (back.removed, back.added) == (1, 0)
            await repo.restore(str(copy), thread_id="there", checkpoint_id=again.id)
        if can.symlinks and can.hard_links and can.modes and can.mtimes and not receipt.differences:
            assert compare_trees(local, copy) == []


class HookError(Exception):
    """What a test's own code raises."""


class Calls:
    """What hooks were called, in order, and with which handles."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.handles: list[SandboxHandle] = []

    def note(self, name: str) -> Hook:
        async def hook(handle: SandboxHandle) -> None:
            self.calls.append(name)
            self.handles.append(handle)

        return hook

    def fail(self, words: str) -> Hook:
        async def hook(handle: SandboxHandle) -> None:
            self.calls.append("fail")
            self.handles.append(handle)
            raise HookError(words)

        return hook


class _Everything:
    """A selection that leaves nothing out."""

    marked_folders: dict[bytes, bytes] = {}

    def excludes(self, path: bytes, kind: int) -> bool:
        return False


def _uses(handle: SandboxHandle, abilities: Abilities) -> list[Attempt]:
    """What can be asked of a handle."""
    uses: list[Attempt] = [lambda: _get(handle, "file"), lambda: _put(handle, "file", b"")]
    return [*uses, lambda: handle.exec("true")] if abilities.exec else uses


async def _put(handle: SandboxHandle, name: str, data: bytes) -> None:
    await handle.upload(f"{handle.workspace_root}/{name}", data)


async def _get(handle: SandboxHandle, name: str) -> bytes:
    return b"".join([piece async for piece in handle.download(f"{handle.workspace_root}/{name}")])
