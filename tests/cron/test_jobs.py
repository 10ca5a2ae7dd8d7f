"""Jobs files: what they come to, and that each mistake is told with the file, the job and the key before anything runs."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from snapcore.cron.jobs import Plan, make_plan, sandbox_name
from snapcore.cron.schedule import Every
from snapcore.errors import Code, SnapshotError
from snapcore.forgetting import KeepRules
from snapcore.settings_files import find_settings, load_settings

JOB = '[jobs.web]\nsandbox = "work"\nevery = "5min"\n'


def plan(folder: Path, text: str, *only: str) -> Plan:
    (folder / "jobs.toml").write_text(text)
    return make_plan(load_settings(str(folder / "jobs.toml")), only)


def test_a_job_of_few_words(tmp_path: Path) -> None:
    job = plan(tmp_path, JOB).jobs["web"]
    assert job.sandbox == str(tmp_path / "work")
    assert job.thread_id("whatever") == "web"
    assert job.schedule == Every(300)
    assert (job.jitter, job.timeout, job.keep, job.secrets) == (0, None, None, {})


def test_a_job_of_many_words(tmp_path: Path) -> None:
    text = """
    [secrets]
    SHARED = { env = "SHARED" }
    [policy]
    exclude = ["*.log"]
    [cron]
    timezone = "Europe/Berlin"
    parallel = 2
    health-file = "state/health.json"
    listen = "[::1]:9464"
    gc = { cron = "@weekly", grace = "0" }
    [jobs.many]
    select = "folders:agents/*"
    thread = "{job}/{name}"
    cron = "0 3 * * mon-fri"
    jitter = "10min"
    timeout = "1h"
    label = "nightly"
    keep = { last = 3, within = "7d", labeled = false }
    policy = { everything = true }
    secrets = { OWN = { file = "own.txt" } }
    """
    made = plan(tmp_path, text)
    job = made.jobs["many"]
    assert made.parallel == 2
    assert made.health_file == str(tmp_path / "state/health.json")
    assert made.listen == ("::1", 9464)
    assert made.gc.grace == 0
    assert job.selector is not None
    assert job.selector.what == str(tmp_path / "agents/*")
    assert job.thread_id("a b") == "many/a b"
    assert (job.jitter, job.timeout, job.label) == (600, 3600, "nightly")
    assert set(job.secrets) == {"SHARED", "OWN"}
    assert job.keep is not None
    assert job.keep == KeepRules(last=3, within="7d", labeled=False)
    assert not job.policy.defaults
    assert job.schedule.interval(datetime(2026, 6, 1, 12, tzinfo=UTC)) == 86_400


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no jobs"]),
        ('[jobs.web]\nevery = "5min"\n', ["[jobs.web]", "sandbox"]),
        (JOB + 'select = "folders:x/*"\n', ["[jobs.web]", "sandbox", "select"]),
        ('[jobs.web]\nsandbox = "work"\n', ["[jobs.web]", "every", "cron"]),
        (JOB + 'cron = "@daily"\n', ["[jobs.web]", "every", "cron"]),
        ('[jobs.web]\nsandbox = ""\nevery = "1h"\n', ["[jobs.web]", "sandbox"]),
        ('[jobs.web]\nsandbox = "w"\nevery = "soon"\n', ["[jobs.web]", "every"]),
        ('[jobs.web]\nsandbox = "w"\nevery = "0s"\n', ["[jobs.web]", "every"]),
        ('[jobs.web]\nsandbox = "w"\ncron = "0 25 * * *"\n', ["[jobs.web]", "cron", "25"]),
        ('[jobs.web]\nsandbox = "w"\ncron = "@daily"\ntimezone = "Mars/X"\n', ["[jobs.web]", "timezone", "Mars/X"]),
        (JOB + 'timezone = "UTC"\n', ["[jobs.web]", "timezone"]),
        (JOB + 'jitter = "5min"\n', ["[jobs.web]", "jitter"]),
        (JOB + 'jitter = "x"\n', ["[jobs.web]", "jitter"]),
        (JOB + 'timeout = "0s"\n', ["[jobs.web]", "timeout"]),
        (JOB + 'thread = "{host}"\n', ["[jobs.web]", "thread", "{host}"]),
        (JOB + 'thread = "a}"\n', ["[jobs.web]", "thread", "}"]),
        (JOB + 'thread = ""\n', ["[jobs.web]", "thread"]),
        (JOB + 'thread = "a\\u0007"\n', ["[jobs.web]", "thread"]),
        ('[jobs."a\\nb"]\nsandbox = "w"\nevery = "1h"\n', ["[jobs.a\\nb]", "name"]),
        ('[jobs.gc]\nsandbox = "w"\nevery = "1h"\n', ["[jobs.gc]", "gc"]),
        ('[jobs.web]\nselect = "folders:x/*"\nevery = "1h"\n', ["[jobs.web]", "thread", "{name}"]),
        ('[jobs.web]\nselect = "folders:x/**"\nthread = "{name}"\nevery = "1h"\n', ["[jobs.web]", "select", "**"]),
        ('[jobs.web]\nselect = "pods:x"\nthread = "{name}"\nevery = "1h"\n', ["[jobs.web]", "select", "pods:x"]),
        ('[jobs.web]\nselect = "docker:label="\nthread = "{name}"\nevery = "1h"\n', ["[jobs.web]", "select"]),
        (JOB + "keep = { last = 0 }\n", ["[jobs.web]", "keep"]),
        (JOB + "keep = { }\n", ["[jobs.web]", "keep"]),
        (JOB + 'label = "x"\nkeep = { last = 3 }\n', ["[jobs.web]", "keep", "label"]),
        (JOB + 'policy = { include = ["a\\u0000"] }\n', ["[jobs.web]", "policy"]),
        ("[cron]\nparallel = 0\n" + JOB, ["[cron]", "parallel"]),
        ('[cron]\ntimezone = "nowhere"\n' + JOB, ["[cron]", "timezone"]),
        ('[cron]\nlisten = "9464"\n' + JOB, ["[cron]", "listen"]),
        ('[cron]\nlisten = "::1:9464"\n' + JOB, ["[cron]", "listen"]),
        ('[cron]\nlisten = "localhost:99999"\n' + JOB, ["[cron]", "listen"]),
        pytest.param(f'[cron]\nlisten = "localhost:{"9" * 5000}"\n' + JOB, ["[cron]", "listen"], id="a port of 5000 digits"),
        ('[cron.gc]\nevery = "1d"\ncron = "@daily"\n' + JOB, ["[cron.gc]", "every"]),
        ('[cron.gc]\ngrace = "x"\n' + JOB, ["[cron.gc]", "grace"]),
        (JOB + JOB.replace("web", "copy") + 'workspace = "below"\nthread = "web"\n', ["[jobs.copy]", "thread", "web"]),
        (JOB + JOB.replace("web", "copy").replace('"work"', '"other"') + 'thread = "web"\n', ["[jobs.copy]", "thread", "web"]),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(SnapshotError) as caught:
        plan(tmp_path, text)
    assert caught.value.code == Code.INVALID_REQUEST
    for word in ["jobs.toml", *words]:
        assert word in str(caught.value)


def test_two_jobs_may_capture_one_sandbox_into_one_thread(tmp_path: Path) -> None:
    text = JOB + JOB.replace("web", "nightly").replace('every = "5min"', 'cron = "@daily"') + 'thread = "web"\n'
    assert set(plan(tmp_path, text).jobs) == {"web", "nightly"}


def test_only_the_named_jobs(tmp_path: Path) -> None:
    text = '[cron.gc]\nevery = "1d"\n' + JOB + JOB.replace("web", "two")
    assert set(plan(tmp_path, text, "two").jobs) == {"two"}
    assert plan(tmp_path, text, "two").gc.schedule is None
    assert plan(tmp_path, text, "gc").gc.schedule == Every(86_400)
    assert plan(tmp_path, text, "gc").jobs == {}
    with pytest.raises(SnapshotError, match="no job 'three'"):
        plan(tmp_path, text, "three")
    with pytest.raises(SnapshotError, match=r"\[cron.gc\]"):
        plan(tmp_path, JOB, "gc")


def test_an_address_in_the_place_of_a_selector_is_told_without_its_password(tmp_path: Path) -> None:
    text = '[jobs.web]\nselect = "ssh://me:hunter2-hunter2@host/srv"\nthread = "{name}"\nevery = "1h"\n'
    with pytest.raises(SnapshotError, match="ssh://me:") as caught:
        plan(tmp_path, text)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        JOB.replace('"work"', '"exec:sh -c true /workspace"'),
        JOB + 'secrets = { TOKEN = { command = "pass show token" } }\n',
    ],
)
def test_a_file_that_was_only_found_starts_no_command(tmp_path: Path, text: str) -> None:
    (tmp_path / "snapcore.toml").write_text(text)
    found = find_settings(str(tmp_path))
    assert found is not None
    with pytest.raises(SnapshotError, match="found"):
        make_plan(found)
    make_plan(load_settings(str(tmp_path / "snapcore.toml")))


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("docker://box/workspace", "box"),
        ("docker://box?freeze=1", "box"),
        ("ssh://me@host:22/srv", "host:22"),
        ("exec:kubectl exec -i pod -- /workspace", "workspace"),
        ("/srv/work/", "work"),
    ],
)
def test_the_name_of_a_single_sandbox(tmp_path: Path, address: str, name: str) -> None:
    job = plan(tmp_path, f'[jobs.one]\nsandbox = "{address}"\nthread = "{{name}}"\nevery = "1h"\n').jobs["one"]
    assert job.sandbox is not None
    assert sandbox_name(job.sandbox) == name
