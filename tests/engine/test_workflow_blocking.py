"""Workflows and forks at a step without async."""

from pathlib import Path

import snapcore
from snapcore.providers.local import LocalProvider


def test_a_workflow_runs_and_is_gone_on_with(tmp_path: Path) -> None:
    flow = (
        snapcore.workflow("t").sandbox(LocalProvider(tmp_path / "sandboxes")).exec("echo 1 > a").checkpoint("one").exec("cat a")
    )
    with snapcore.blocking.open_repository(tmp_path / "repo") as repo:
        first = repo.run_workflow(flow)
        seen: list[bytes] = []
        second = repo.run_workflow(flow, on_output=lambda stream, piece: seen.append(piece))
    assert [step.state for step in first.steps] == ["done"] * 3
    assert [step.state for step in second.steps] == ["replayed", "replayed", "done"]
    assert b"".join(seen) == b"1\n"


def test_what_a_fork_lacks_is_run_again(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path / "sandboxes")
    with snapcore.blocking.open_repository(tmp_path / "repo") as repo:
        with repo.session(provider, thread_id="t") as session:
            session.checkpoint("start")
            session.exec("echo 1 > a")
        report = repo.fork_with_report("t", to_thread_id="u", at_step=1)
        with repo.resume("u", provider=provider, replay="off") as fork:
            assert len(fork.run_again(report).done) == 1
            assert (Path(fork.binding.workspace_root) / "a").read_text() == "1\n"
