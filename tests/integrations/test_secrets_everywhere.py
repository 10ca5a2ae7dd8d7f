"""Case 28 through each integration: a secret, in whatever form a tool wrote it, is in no record, no row and no file of the
repository, in no log line, and in nothing that a model or a kernel is told.
"""

import importlib
import io
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.integrations.agent_tools import AgentTools
from snapcore.integrations.coding_tools import CodingTools
from snapcore.providers.local import LocalProvider, LocalSandbox
from snapcore.repository import Repository

_secrets: Any = importlib.import_module("..engine.test_secrets", __package__)
SECRETS, ALL_FORMS, assert_no_secret = _secrets.SECRETS, _secrets.ALL_FORMS, _secrets.assert_no_secret

EVERYTHING = b"\n".join(ALL_FORMS.values()) + b"\n"
TEXTS = {name: form.decode() for name, form in ALL_FORMS.items() if form.isascii()}


@pytest.fixture
async def repo(tmp_path: Path) -> AsyncIterator[Repository]:
    async with snapcore.open_repository(tmp_path / "repo") as opened:
        yield opened


def assert_not_told(text: str) -> None:
    """`text` is JSON, or lines of a log."""
    for name, form in TEXTS.items():
        assert form not in text, name
        assert json.dumps(form)[1:-1] not in text, name


async def test_tools(repo: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    root = tmp_path / "work"
    root.mkdir()
    (root / "all").write_bytes(EVERYTHING)
    sandbox = LocalSandbox(root)
    agent = AgentTools(repo, "t", sandbox, fork_to=lambda source: "fork", allow_restore=True, secrets=SECRETS)
    results = []
    async with CodingTools(sandbox, repo, thread_id="t", every=20, secrets=SECRETS) as tools:
        results += [await tools.read_file("all"), await tools.exec("cat all; cat all >&2"), await tools.exec("cat all; exit 1")]
        for number, text in enumerate(TEXTS.values()):
            results += [
                await tools.write_file(f"note{number}", f"see {text} there"),
                await tools.edit(f"note{number}", text, text + text),
                await tools.edit(f"note{number}", f"no {text}", "x"),
                await tools.read_file(f"no/{text}"),
                await tools.exec(f"no-such-program {number}", cwd=text[:200]),
                await tools.list(text),
            ]
        results += [await tools.list(), await tools.exec("sleep 100 & cat all; wait", timeout_seconds=1)]
    for number, text in enumerate(TEXTS.values()):
        results += [
            await agent.save(f"l{number} {text}"[:100], artifacts={"note": text, f"n{number}": f"{text}{text}"}),
            await agent.read_artifact("latest", "note"),
            await agent.read_artifact(text, text),
            await agent.diff(text),
            await agent.restore_preview(text),
            await agent.save("x", artifacts={text[:100]: "y"}),
        ]
    (root / SECRETS["KEY"]).touch()
    results += [await agent.list(), await agent.fork(), await agent.restore_preview(), await tools.list(), await agent.save()]
    assert len(results) > 200
    for result in results:
        assert_not_told(result.content)
    assert_not_told("\n".join(caplog.messages))
    await assert_no_secret(repo, tmp_path / "repo")


async def test_sessions_of_the_openai_agents_sdk(repo: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("agents")
    from snapcore.integrations.openai_agents import SnapshotClient

    caplog.set_level("DEBUG")
    client = SnapshotClient(repo, secrets=SECRETS, reinject=True)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number, form in enumerate((*ALL_FORMS.values(), EVERYTHING, b"." * (1 << 20) + EVERYTHING)):
            member = tarfile.TarInfo(f"./file{number}")
            member.size = len(form)
            tar.addfile(member, io.BytesIO(form))
    await client.save("session", io.BytesIO(out.getvalue()), label=f"of {SECRETS['TOKEN']}")
    assert_not_told("\n".join(caplog.messages))
    await assert_no_secret(repo, tmp_path / "repo")
    with await client.download("session") as stream, tarfile.open(fileobj=stream) as back:
        content = back.extractfile("./file0")
        assert content is not None
        assert content.read() == next(iter(ALL_FORMS.values()))


async def test_resources_of_rebuno(repo: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rebuno = pytest.importorskip("rebuno")
    from snapcore.integrations.rebuno import SandboxDriver

    from .rebuno_kernel import RebunoKernel
    from .rebuno_worker import run

    caplog.set_level("DEBUG", "snapcore")
    driver = SandboxDriver(repo, LocalProvider(tmp_path / "sandboxes"), secrets=SECRETS)

    async def process() -> str:
        policy = rebuno.CheckpointPolicy(every_steps=1)
        workspace = await rebuno.resource("workspace", driver=driver, checkpoints=policy)

        async def write() -> str:
            await workspace.upload(f"{workspace.workspace_root}/all", EVERYTHING)
            return "written"

        async def name() -> str:
            await workspace.exec(["touch", f"{workspace.workspace_root}/{SECRETS['KEY']}"])
            return "named"

        await rebuno.step("write", write, resources=["workspace"])
        return str(await rebuno.step("name", name, resources=["workspace"]))  # the capture after it is refused

    with RebunoKernel(tmp_path) as kernel:
        execution = await run(kernel, process)
        assert len(kernel.references(execution)) == 2
        assert kernel.events(execution, "resource.checkpoint_failed")
    assert_not_told((tmp_path / "kernel.json").read_text())
    assert_not_told("\n".join(record.getMessage() for record in caplog.records if record.name.startswith("snapcore")))
    await assert_no_secret(repo, tmp_path / "repo")
