"""`snapcore cron install`: what it shows, what it asks, what it writes."""

import os
import re
import stat
import subprocess
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from snapcore.cron import installing

from .commands import Command, command

JOBS = """
[jobs.nightly]
sandbox = "w"
cron = "0 3 * * *"
[jobs.often]
sandbox = "v"
every = "5min"
[cron.gc]
every = "1d"
"""
SYSTEMCTL = '#!/bin/sh\necho "$*" >> "$CALLS"\n'
CRONTAB = """#!/bin/sh
case "$1" in
-l) test -f "$SPOOL" || { echo "no crontab for me" >&2; exit 1; }; cat "$SPOOL" ;;
-) cat > "$SPOOL.new" && mv "$SPOOL.new" "$SPOOL" ;;
esac
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a jobs file; `systemctl` and `crontab` that keep what they are told."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("systemctl", SYSTEMCTL), ("crontab", CRONTAB)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    (home / "jobs.toml").write_text(JOBS)
    for name, value in (
        ("PATH", f"{tools}:{os.environ['PATH']}"),
        ("HOME", str(home)),
        ("CALLS", str(tmp_path / "calls")),
        ("SPOOL", str(tmp_path / "spool")),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(installing, "RUNNING_SYSTEMD", str(tmp_path / "running"))
    monkeypatch.setattr(installing, "SYSTEM_FOLDER", str(tmp_path / "system"))
    monkeypatch.setattr("snapcore.cron.crontab.local_zone", lambda: ZoneInfo("UTC"))
    monkeypatch.chdir(home)
    return tmp_path


@pytest.fixture
def run(world: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Without a terminal, and without a repository that only the environment names."""
    run = command(monkeypatch, world / "repo")
    monkeypatch.delenv("SNAPCORE_REPO")
    return run


@pytest.fixture
def typing(world: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """With a terminal."""
    run = command(monkeypatch, world / "repo", terminal=True)
    monkeypatch.delenv("SNAPCORE_REPO")
    return run


@pytest.fixture
def booted(world: Path) -> None:
    (world / "running").mkdir()


def units(world: Path, *, system: bool = False) -> dict[str, str]:
    folder = world / "system" if system else world / "home/.config/systemd/user"
    return {path.name.split("-", 2)[2]: path.read_text() for path in folder.iterdir()} if folder.exists() else {}


def calls(world: Path) -> list[str]:
    """What systemctl was told, without the part of names that tells files apart."""
    text = (world / "calls").read_text() if (world / "calls").exists() else ""
    (world / "calls").unlink(missing_ok=True)
    return [re.sub(r"snapcore-[0-9a-f]{8}-", "", line) for line in text.splitlines()]


# ---- whether anything is written


def test_without_a_terminal_and_without_yes_nothing_is_written(world: Path, run: Command) -> None:
    for kind in ("--systemd", "--crontab"):
        outcome = run("cron", "install", "jobs.toml", "--job", "often", kind, code=2)
        assert "cron run" in outcome.text
        assert "nothing was written" in outcome.stderr
    assert units(world) == units(world, system=True) == {}
    assert not (world / "spool").exists()
    assert run("cron", "install", "jobs.toml", "--all", "--systemd", "--json", code=2).json["written"] is False


@pytest.mark.parametrize("answer", ["", "\n", "n\n", "no\n", "yesterday\n"])
def test_on_a_terminal_it_asks_and_takes_nothing_but_yes(world: Path, typing: Command, answer: str) -> None:
    outcome = typing("cron", "install", "jobs.toml", "--all", "--systemd", "--user", typed=answer, code=1)
    assert "Write this? [y/N]" in outcome.stderr
    assert units(world) == {}


@pytest.mark.parametrize("answer", ["y\n", "Yes\n"])
def test_on_a_terminal_yes_writes_what_was_shown(world: Path, typing: Command, answer: str) -> None:
    shown = typing("cron", "install", "jobs.toml", "--all", "--systemd", "--user", typed=answer).text
    written = units(world)
    assert sorted(written) == [f"{job}.{kind}" for job in ("gc", "nightly", "often") for kind in ("service", "timer")]
    assert all(text in shown for text in written.values())


def test_a_dry_run_shows_and_writes_nothing(world: Path, run: Command) -> None:
    shown = run("cron", "install", "jobs.toml", "--all", "--systemd", "--user", "--dry-run", "--yes").text
    assert "OnCalendar=*-*-* 03:00:00 UTC" in shown
    assert "OnUnitActiveSec=300s" in shown
    run("cron", "install", "jobs.toml", "--all", "--crontab", "--dry-run", "--yes")
    assert units(world) == {}
    assert not (world / "spool").exists()


# ---- systemd


def test_a_service_runs_this_snapcore_with_the_file_and_the_job(world: Path, run: Command) -> None:
    run("cron", "install", "jobs.toml", "--job", "nightly", "--systemd", "--user", "--yes")
    service = units(world)["nightly.service"]
    (line,) = [line for line in service.splitlines() if line.startswith("ExecStart=")]
    words = line.removeprefix("ExecStart=").split()
    assert words[1:] == ["cron", "run", str(world / "home/jobs.toml"), "--job", "nightly", "--once"]
    assert os.access(words[0], os.X_OK)
    assert os.path.isabs(words[0])


@pytest.mark.usefixtures("booted")
def test_systemd_is_told_when_it_runs(world: Path, run: Command) -> None:
    run("cron", "install", "jobs.toml", "--all", "--user", "--yes")
    assert calls(world) == ["--user daemon-reload", "--user enable --now nightly.timer often.timer gc.timer"]
    assert "Nothing has to be changed." in run("cron", "install", "jobs.toml", "--all", "--user", "--yes").text
    assert calls(world) == []
    (world / "home/jobs.toml").write_text(JOBS.replace("0 3", "0 4"))
    run("cron", "install", "jobs.toml", "--all", "--user", "--yes")
    assert calls(world) == [
        "--user daemon-reload",
        "--user enable --now nightly.timer often.timer gc.timer",
        "--user restart nightly.timer",
    ]
    run("cron", "install", "jobs.toml", "--job", "often", "--user", "--yes")
    assert calls(world)[0] == "--user disable --now gc.timer nightly.timer"
    assert sorted(units(world)) == ["often.service", "often.timer"]


@pytest.mark.usefixtures("booted")
def test_the_scheduler_takes_the_place_of_timers(world: Path, run: Command) -> None:
    run("cron", "install", "jobs.toml", "--all", "--system", "--yes")
    calls(world)
    run("cron", "install", "jobs.toml", "--daemon", "--system", "--yes")
    assert list(units(world, system=True)) == ["scheduler.service"]
    text = units(world, system=True)["scheduler.service"]
    assert "Restart=on-failure" in text
    assert "ExecReload=/bin/kill -HUP $MAINPID" in text
    assert f"/snapcore cron run {world}/home/jobs.toml\n" in text
    assert calls(world) == [
        "disable --now gc.timer nightly.timer often.timer",
        "daemon-reload",
        "enable --now scheduler.service",
    ]


@pytest.mark.usefixtures("booted")
def test_what_was_installed_is_removed(world: Path, run: Command) -> None:
    run("cron", "install", "jobs.toml", "--daemon", "--user", "--yes")
    calls(world)
    (world / "home/jobs.toml").unlink()
    shown = run("cron", "install", "jobs.toml", "--remove", "--user", "--yes").text
    assert "scheduler.service is removed" in shown
    assert units(world) == {}
    assert calls(world) == ["--user disable --now scheduler.service", "--user daemon-reload"]
    assert "Nothing has to be changed." in run("cron", "install", "jobs.toml", "--remove", "--user", "--yes").text


def test_where_systemd_does_not_run_the_commands_are_said(world: Path, run: Command) -> None:
    said = run("cron", "install", "jobs.toml", "--job", "often", "--systemd", "--user", "--yes").text
    assert "systemd does not run here" in said
    assert "systemctl --user enable --now snapcore-" in said.rpartition("run:")[2]
    assert calls(world) == []
    assert "often.timer" in units(world)


@pytest.mark.usefixtures("booted")
def test_what_systemd_refuses_is_told(world: Path, run: Command) -> None:
    (world / "tools/systemctl").write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")
    error = run("cron", "install", "jobs.toml", "--job", "often", "--user", "--yes", code=1).stderr
    assert "`systemctl --user daemon-reload` failed: Failed to connect to bus" in error


def test_units_of_another_file_are_left_alone(world: Path, run: Command) -> None:
    (world / "home/other.toml").write_text(JOBS)
    run("cron", "install", "other.toml", "--all", "--systemd", "--user", "--yes")
    run("cron", "install", "jobs.toml", "--job", "often", "--systemd", "--user", "--yes")
    run("cron", "install", "jobs.toml", "--remove", "--systemd", "--user", "--yes")
    assert len(units(world)) == 6


def test_unit_files_can_be_read_by_all_and_written_by_their_owner(world: Path, run: Command) -> None:
    run("cron", "install", "jobs.toml", "--job", "often", "--systemd", "--user", "--yes")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (world / "home/.config/systemd/user").iterdir()}
    assert modes == {0o644}


# ---- crontab


def test_a_crontab_gets_a_block_that_is_replaced_and_removed(world: Path, run: Command) -> None:
    (world / "spool").write_bytes(b"MAILTO=me\n0 5 * * * mine \xff\n")
    run("cron", "install", "jobs.toml", "--all", "--crontab", "--yes")
    lines = (world / "spool").read_bytes().decode("latin-1").splitlines()
    assert lines[:3] == ["MAILTO=me", "0 5 * * * mine \xff", f"# BEGIN snapcore: {world}/home/jobs.toml"]
    assert [line.split(" PATH=")[0] for line in lines[3:-1]] == ["0 3 * * *", "*/5 * * * *", "0 0 * * *"]
    assert lines[4].endswith(f" cron run {world}/home/jobs.toml --job often --once -q")
    before = (world / "spool").read_bytes()
    assert "Nothing has to be changed." in run("cron", "install", "jobs.toml", "--all", "--crontab", "--yes").text
    assert (world / "spool").read_bytes() == before
    run("cron", "install", "jobs.toml", "--job", "often", "--crontab", "--yes")
    assert len((world / "spool").read_bytes().splitlines()) == 5
    run("cron", "install", "jobs.toml", "--remove", "--crontab", "--yes")
    assert (world / "spool").read_bytes() == b"MAILTO=me\n0 5 * * * mine \xff\n"


def test_a_user_without_a_crontab_gets_one(world: Path, run: Command) -> None:
    run("cron", "install", "jobs.toml", "--job", "often", "--crontab", "--yes")
    assert (world / "spool").read_text().startswith("# BEGIN snapcore: ")


def test_a_crontab_that_cannot_be_read_is_not_written(world: Path, run: Command) -> None:
    (world / "tools/crontab").write_text("#!/bin/sh\necho 'you are not allowed to use this program' >&2\nexit 1\n")
    error = run("cron", "install", "jobs.toml", "--job", "often", "--crontab", "--yes", code=2).stderr
    assert "you are not allowed" in error
    assert not (world / "spool").exists()


def test_a_crontab_line_does_its_job(world: Path, run: Command) -> None:
    """As cron starts it: by sh, in an environment with next to nothing, without a terminal."""
    (world / "home/w").mkdir()
    (world / "home/w/file").write_text("x")
    (world / "home/jobs.toml").write_text(f'repo = "{world}/repo"\n{JOBS}')
    run("init", "--repo", str(world / "repo"))
    run("cron", "install", "jobs.toml", "--job", "nightly", "--crontab", "--yes")
    line = (world / "spool").read_text().splitlines()[1].removeprefix("0 3 * * * ")
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(world / "home"), "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh", "LOGNAME": "me"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "cron would send mail"
    status = run("cron", "status", "jobs.toml", "--job", "nightly", "--json").json["jobs"]
    assert status[0]["last_run"]["outcome"] == "captured"


# ---- what jobs need to know


def test_secrets_are_pointed_out_and_never_written(world: Path, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "hunter2-hunter2")
    (world / "home/jobs.toml").write_text(f'database = "postgresql://u:hunter2-hunter2@h/d"\nsecrets.A.env = "API_TOKEN"\n{JOBS}')
    (world / "home/my.env").write_text("API_TOKEN=hunter2-hunter2\n")
    (world / "home/my.env").chmod(0o600)
    shown = run("cron", "install", "jobs.toml", "--all", "--systemd", "--user", "--yes")
    assert "The jobs need API_TOKEN, which they will not have: see --environment-file." in shown.text
    with_file = run("cron", "install", "jobs.toml", "--all", "--systemd", "--user", "--yes", "--environment-file", "my.env")
    assert f"EnvironmentFile={world}/home/my.env\n" in units(world)["often.service"]
    assert "my.env has to set API_TOKEN." in with_file.text
    assert "chmod 600" not in with_file.text
    (world / "home/my.env").chmod(0o640)
    crontab = run("cron", "install", "jobs.toml", "--all", "--crontab", "--yes", "--environment-file", "my.env")
    assert f"set -a; . {world}/home/my.env; PATH=" in (world / "spool").read_text()
    assert f"Others can read {world}/home/my.env: chmod 600 keeps it yours." in crontab.text
    for text in (shown.text, with_file.text, crontab.text, *units(world).values(), (world / "spool").read_text()):
        assert "hunter2" not in text
    run("cron", "install", "jobs.toml", "--all", "--crontab", "--environment-file", "none.env", code=2)


def test_a_repository_that_only_this_shell_knows_is_refused(world: Path, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("cron", "install", "jobs.toml", "--job", "often", "--systemd", "--user", "--yes")
    assert "--environment-file" in run(*arguments, "--repo", "elsewhere", code=2).stderr
    for name in ("SNAPCORE_REPO", "SNAPCORE_DATABASE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "sqlite:///elsewhere")
            assert name in run(*arguments, code=2).stderr
            assert units(world) == {}
            (world / "home/my.env").write_text(f"{name}=sqlite:///elsewhere\n")
    run(*arguments, "--environment-file", "my.env")


# ---- requests that make no sense


@pytest.mark.parametrize(
    "arguments",
    [
        "jobs.toml",
        "jobs.toml --all --job often",
        "jobs.toml --all --daemon",
        "jobs.toml --all --remove",
        "jobs.toml --all --systemd --crontab",
        "jobs.toml --all --user --system",
        "jobs.toml --all --crontab --user",
        "jobs.toml --daemon --crontab",
        "jobs.toml --job unknown",
        "missing.toml --all",
        "--all",
    ],
)
def test_requests_that_make_no_sense_are_refused(world: Path, run: Command, arguments: str) -> None:
    run("cron", "install", *arguments.split(), "--yes", code=2)
    assert units(world) == units(world, system=True) == {}


def test_what_cron_cannot_do_is_refused(world: Path, run: Command) -> None:
    (world / "home/jobs.toml").write_text(JOBS.replace("5min", "7min"))
    assert "6min or 10min" in run("cron", "install", "jobs.toml", "--all", "--crontab", "--yes", code=2).stderr
    assert not (world / "spool").exists()


def test_root_gets_the_system_s_units_and_others_their_own(world: Path, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    install = ("cron", "install", "jobs.toml", "--job", "often", "--systemd", "--yes")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    run(*install)
    assert (len(units(world)), len(units(world, system=True))) == (0, 2)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    run(*install)
    assert (len(units(world)), len(units(world, system=True))) == (2, 2)
