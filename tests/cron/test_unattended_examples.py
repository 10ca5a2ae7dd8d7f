"""The examples of docs/cron.md for crontab, systemd and Kubernetes do what they say, with folders that are there."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml

from snapcore.cron import systemd
from snapcore.cron.entries import Entry
from snapcore.cron.schedule import parse_cron

from ..docs_examples import Block, blocks  # noqa: TID252  # the tests are no package that could be named

SNAPCORE = os.path.join(os.path.dirname(sys.executable), "snapcore")
PAGE = "docs/cron.md"
KUBECTL = """#!/bin/sh
test "$1 $2 $3 $4 $5 $6" = "exec -i agent-0 -c main --" || { echo "unexpected: $*" >&2; exit 64; }
shift 6
echo called >> "$(dirname "$0")/calls"
exec "$@"
"""


def titled(title: str) -> Block:
    (block,) = [block for block in blocks(PAGE) if block.title == title]
    return block


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a repository, a workspace and the folder of a pod; `snapcore` and `kubectl` in `bin`."""
    for name in ("workspace", "pod"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/snapcore").symlink_to(SNAPCORE)
    (tmp_path / "bin/kubectl").write_text(KUBECTL)
    (tmp_path / "bin/kubectl").chmod(0o755)
    started(tmp_path, [SNAPCORE, "init", "-q", "--repo", str(tmp_path / "repo")])
    return tmp_path


def started(home: Path, words: list[str], **variables: str) -> str:
    """Stdout of a command that goes well, as it is without a terminal and with next to no variable."""
    environment = {"HOME": str(home), "PATH": f"{home}/bin:/usr/bin:/bin", **variables}
    done = subprocess.run(
        words, env=environment, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def saved(home: Path, thread: str) -> int:
    """How many checkpoints the thread has."""
    text = started(home, [SNAPCORE, "list", "--thread", thread, "--json", "--repo", str(home / "repo")])
    return len(yaml.safe_load(text))


def placed(home: Path, text: str, **places: str) -> str:
    """The text with folders that are there instead of its own."""
    for name, place in places.items():
        assert name in text
        text = text.replace(name, str(home / place))
    return text


def test_the_line_of_a_crontab_saves_the_folder_when_it_has_changed(home: Path) -> None:
    (block,) = [block for block in blocks(PAGE) if block.language == "crontab"]
    (line,) = block.code.splitlines()
    fields = line.split(maxsplit=5)
    parse_cron(" ".join(fields[:5]), ZoneInfo("UTC"), "cron")
    command = placed(
        home,
        fields[5],
        **{"/srv/agent/workspace": "workspace", "/srv/backups": "repo", "/usr/local/bin/snapcore": "bin/snapcore"},
    )
    for _ in range(2):
        assert started(home, ["/bin/sh", "-c", command]) == "", "cron would send mail"
    assert saved(home, "thread-1") == 1
    (home / "workspace/file").write_text("changed")
    started(home, ["/bin/sh", "-c", command])
    assert saved(home, "thread-1") == 2


def test_the_units_are_those_that_install_writes() -> None:
    command = shlex.split("/usr/local/bin/snapcore cron run /etc/snapcore/jobs.toml --job nightly --once")
    entry = Entry("nightly", parse_cron("0 3 * * *", ZoneInfo("Europe/Berlin"), "cron"), 300)
    made = systemd.job_units(entry, command, "/etc/snapcore/jobs.toml", system=True, environment_file="/etc/snapcore/jobs.env")
    for unit, kind in zip(made, ("service", "timer"), strict=True):
        shown = titled(f"snapcore-1a2b3c4d-nightly.{kind}").code
        assert shown == unit.text.replace(systemd.prefix("/etc/snapcore/jobs.toml"), "snapcore-1a2b3c4d-")


def test_the_service_s_command_runs_the_job(home: Path) -> None:
    lines = titled("snapcore-1a2b3c4d-nightly.service").code.splitlines()
    (command,) = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    settings = titled("nightly.toml").code
    assert 'sandbox = "workspace"' in settings
    (home / "jobs.toml").write_text(settings.replace("nightly-repo", "repo"))
    words = shlex.split(
        placed(home, command, **{"/usr/local/bin/snapcore": "bin/snapcore", "/etc/snapcore/jobs.toml": "jobs.toml"})
    )
    subprocess.run(words, env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, cwd="/", check=True, capture_output=True, timeout=60)
    assert saved(home, "thread-1") == 1


def kinds(title: str) -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(titled(title).code)}


def container(job: dict[str, Any]) -> dict[str, Any]:
    assert job["spec"]["concurrencyPolicy"] == "Forbid"
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (only,) = pod["containers"]
    parse_cron(job["spec"]["schedule"], ZoneInfo(job["spec"]["timeZone"]), "cron")
    found: dict[str, Any] = only
    return found


def test_a_cronjob_saves_what_a_pod_has_by_kubectl(home: Path) -> None:
    found = container(kinds("snapcore-cronjob.yaml")["CronJob"])
    words = [*found["command"], *found["args"]]
    place = next(number for number, word in enumerate(words) if word.startswith("exec:"))
    words[place] = placed(home, words[place], **{"/workspace": "pod"})
    for _ in range(2):
        assert started(home, words, SNAPCORE_REPO=str(home / "repo")) == ""
    assert saved(home, "agent-0") == 1
    assert (home / "bin/calls").read_text().startswith("called")
    listed = started(home, [SNAPCORE, "cat", "latest:file", "--thread", "agent-0", "--repo", str(home / "repo")])
    assert listed == "pod"


def test_its_account_may_do_what_the_command_needs_and_no_more() -> None:
    found = kinds("snapcore-cronjob.yaml")
    account = found["ServiceAccount"]["metadata"]["name"]
    pod = found["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account
    assert found["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    allowed = {resource: rule for rule in found["Role"]["rules"] for resource in rule["resources"]}
    assert set(allowed) == {"pods", "pods/exec"}
    assert set(allowed["pods"]["verbs"]) == {"get"}
    assert {"create", "get"} == set(allowed["pods/exec"]["verbs"])
    (address,) = [word for word in container(found["CronJob"])["args"] if word.startswith("exec:")]
    assert allowed["pods/exec"]["resourceNames"] == [shlex.split(address)[3]]


@pytest.mark.parametrize("title", ["snapcore-cronjob.yaml", "snapcore-volume.yaml"])
def test_credentials_come_from_the_secret_alone(title: str) -> None:
    secret = kinds("snapcore-cronjob.yaml")["Secret"]
    found = container(kinds(title)["CronJob"])
    assert [source["secretRef"]["name"] for source in found["envFrom"]] == [secret["metadata"]["name"]]
    for value in secret["stringData"].values():
        assert value not in str(kinds(title)["CronJob"])
    assert {"SNAPCORE_REPO", "SNAPCORE_DATABASE"} <= set(secret["stringData"])


def test_a_cronjob_saves_a_volume(home: Path) -> None:
    job = kinds("snapcore-volume.yaml")["CronJob"]
    found = container(job)
    (mount,) = found["volumeMounts"]
    assert mount["readOnly"] is True
    assert mount["mountPath"] in found["args"]
    words = [str(home / "workspace") if word == mount["mountPath"] else word for word in (*found["command"], *found["args"])]
    (home / "workspace").chmod(0o555)
    started(home, words, SNAPCORE_REPO=str(home / "repo"))
    assert saved(home, "agent-0") == 1
