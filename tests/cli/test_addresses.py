"""Sandboxes of other kinds by their addresses on the command line."""

import shlex
from pathlib import Path

from snapcore.testing.trees import compare_trees, make_tree

from .. import ssh_server as servers  # noqa: TID252  # the tests are no package that could be named
from .conftest import Run


def test_capture_and_restore_by_a_command_and_by_ssh(run: Run, tmp_path: Path, shared_ssh_on_path: servers.SshServer) -> None:
    work, copy = tmp_path / "work space", tmp_path / "copy"
    make_tree(work, files=20)
    run("init")
    behind = f"exec:env -i PATH=/usr/bin:/bin {shlex.quote(str(work))}"
    first = run("capture", behind, "--thread", "t", "--everything", "--json").json
    there = run(
        "restore", f"ssh://{shared_ssh_on_path.user}@127.0.0.1:{shared_ssh_on_path.port}{copy}", "--thread", "t", "--json"
    ).json
    assert there["content_id"] == first["content_id"]
    assert there["differences"] == []
    assert compare_trees(work, copy) == []
    (copy / "run.sh").unlink()
    run("restore", f"exec:ssh sandbox {copy}", "--thread", "t")
    assert compare_trees(work, copy) == []


def test_addresses_that_make_no_sense_are_errors(run: Run, tmp_path: Path) -> None:
    run("init")
    for address in ("exec:ssh host", "exec:", "ssh://-oProxyCommand=x/w", "ssh://dev:hunter2@host/w", "nosuch://box"):
        outcome = run("capture", address, "--thread", "t", "--json", code=1)
        assert outcome.error["code"] in ("INVALID_REQUEST", "UNKNOWN_SCHEME")
        assert "hunter2" not in outcome.stderr


def test_a_command_that_leads_nowhere_is_an_error_worth_another_try(run: Run) -> None:
    run("init")
    outcome = run("capture", "exec:sh -c 'echo no route >&2; exit 1' /w", "--thread", "t", "--json", code=1)
    assert outcome.error["code"] == "SANDBOX_UNAVAILABLE"
    assert "no route" in outcome.error["message"]


def test_the_home_folder_and_the_root_of_another_host_are_refused_too(run: Run) -> None:
    run("init")
    for address in ("ssh://host/root", "exec:env -i /", "ssh://host/home/dev"):
        assert run("capture", address, "--thread", "t", "--json", code=1).error["code"] == "INVALID_WORKSPACE"
