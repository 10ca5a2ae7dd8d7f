"""Sessions with a provider that does not do what its contract says: what it gives back is refused, and nothing is stuck."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapcore import Repository
from snapcore.errors import ProviderError
from snapcore.providers.local import LocalProvider, LocalSandbox
from snapcore.sandboxes import Binding, ExecResult, SandboxHandle, SandboxSpec

from .session_helpers import whole_ledger


class LyingSandbox(LocalSandbox):
    lie: dict[str, Any] = {}

    async def exec(self, *arguments: Any, **options: Any) -> ExecResult:
        return msgspec.structs.replace(await super().exec(*arguments, **options), **self.lie)


class LyingProvider(LocalProvider):
    """Opens another sandbox, when it is told to, and makes such as lie about how commands end."""

    another: Binding | None = None

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        return LyingSandbox((await super().create(spec)).workspace_root)

    async def open(self, binding: Binding) -> SandboxHandle:
        return await super().open(self.another or binding)


@pytest.fixture
def provider(tmp_path: Path) -> LyingProvider:
    return LyingProvider(tmp_path / "sandboxes")


@pytest.mark.parametrize(
    "lie",
    [{"exit_code": None}, {"exit_code": "0"}, {"exit_code": 1 << 70}, {"stdout": "text"}, {"stderr": None}],
)
async def test_what_is_no_result_is_refused_and_the_session_goes_on(
    repo: Repository, provider: LyingProvider, lie: dict[str, Any]
) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        assert isinstance(session.handle, LyingSandbox)
        session.handle.lie = lie
        with pytest.raises(ProviderError):
            await session.exec("true")
        session.handle.lie = {}
        assert [event.kind for event in session.uncertain] == ["exec.started"]
        assert (await session.exec("echo on")).stdout == b"on\n"
    assert [event.kind for event in await whole_ledger(repo, "t")][-3:] == ["exec.started", "exec.completed", "sandbox.closed"]


async def test_results_of_other_types_are_those_that_the_ledger_keeps(repo: Repository, provider: LyingProvider) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        assert isinstance(session.handle, LyingSandbox)
        session.handle.lie = {"exit_code": True, "stdout": bytearray(b"x"), "truncated": None}
        done = await session.exec("true")
        assert (done.exit_code, done.stdout, done.truncated) == (1, b"x", False)
        assert [type(value) for value in (done.exit_code, done.stdout, done.truncated)] == [int, bytes, bool]


async def test_another_sandbox_than_the_threads_is_not_worked_in(repo: Repository, provider: LyingProvider) -> None:
    async with await repo.session(provider, thread_id="other") as session:
        await session.write_file("whose", "the other's")
        provider.another = session.binding
    async with await repo.session(provider, thread_id="t") as session:
        await session.write_file("whose", "mine")
    before = await whole_ledger(repo, "t")
    with pytest.raises(ProviderError):
        await repo.session(provider, thread_id="t")
    assert await whole_ledger(repo, "t") == before
    provider.another = None
    async with await repo.session(provider, thread_id="t", replay="strict") as session:
        assert session.replaying == 1
        assert (await session.handle.exec("cat whose")).stdout == b"mine"
