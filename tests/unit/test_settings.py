"""Settings files: what is found, what is read, and what is refused."""

import os
import signal
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapcore.errors import Code, SnapshotError
from snapcore.selection import FilePolicy
from snapcore.settings import PolicySettings, SecretSource, Settings
from snapcore.settings_files import MAX_FILE_BYTES, check_sandbox_address, find_settings, load_settings

SOMEBODY = 54_321
CANARY = "hunter2-canary"


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A folder some levels down."""
    folder = tmp_path / "home" / "project" / "src" / "pkg"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def in_time() -> Iterator[None]:
    """What blocks for good is ended, with an error."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: Path) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        load_settings(str(path))
    assert caught.value.code is Code.INVALID_REQUEST
    assert caught.value.hint
    return caught.value


def repo_of(start: Path) -> str | None:
    loaded = find_settings(str(start))
    return None if loaded is None else loaded.settings.repo


# ---- finding


def test_the_nearest_file_upwards_holds(deep: Path) -> None:
    home, project = deep.parents[2], deep.parents[1]
    assert find_settings(str(deep)) is None
    write(home / "snapcore.toml", "repo = 'of the home folder'")
    assert repo_of(deep) == "of the home folder"
    write(project / "snapcore.toml", "repo = 'of the project'")
    assert repo_of(deep) == "of the project"
    assert repo_of(home) == "of the home folder"


def test_a_found_file_says_where_it_is_and_that_nobody_named_it(deep: Path) -> None:
    path = write(deep.parent / "snapcore.toml", "")
    loaded = find_settings(str(deep))
    assert loaded is not None
    assert (loaded.path, loaded.folder, loaded.named) == (str(path), str(deep.parent), False)
    named = load_settings(str(path))
    assert (named.path, named.folder, named.named) == (str(path), str(deep.parent), True)


def test_the_search_ends_at_the_root_of_the_file_system() -> None:
    loaded = find_settings("/")
    assert loaded is None or loaded.folder == "/"


@pytest.mark.parametrize(
    "text",
    [
        "[tool.snapcore]\nrepo = 'p'",
        "[ tool . snapcore ]\nrepo = 'p'",
        "[tool]\nsnapcore.repo = 'p'",
        "[tool]\n  snapcore = { repo = 'p' }",
        "tool.snapcore.repo = 'p'",
        "tool = { other = {}, snapcore = { repo = 'p' } }",
        "[project]\nname = 'x'\n[tool.'snapcore']\nrepo = 'p'",
        "[tool.snapcore.policy]\nexclude = []\n[tool.snapcore]\nrepo = 'p'",
    ],
)
def test_a_pyproject_with_a_table_of_ours_is_a_settings_file_however_it_is_written(deep: Path, text: str) -> None:
    path = write(deep.parent / "pyproject.toml", text)
    assert repo_of(deep) == "p"
    assert load_settings(str(path)).settings.repo == "p"


def test_a_pyproject_without_one_is_passed_over(deep: Path) -> None:
    write(deep.parents[1] / "snapcore.toml", "repo = 'above'")
    for text in ("[project]\ndependencies = ['snapcore']", "[tool.other]\nsnapcore = 1", "", "[project.scripts]\nsnapcore = 'x'"):
        write(deep / "pyproject.toml", text)
        assert repo_of(deep) == "above"
    path = write(deep / "pyproject.toml", "[project]\nname = 'x'")
    assert "[tool.snapcore]" in refusal(path).message


def test_in_one_folder_snapcore_toml_goes_first(deep: Path) -> None:
    write(deep / "pyproject.toml", "[tool.snapcore]\nrepo = 'p'")
    assert repo_of(deep) == "p"
    write(deep / "snapcore.toml", "repo = 's'")
    assert repo_of(deep) == "s"


def test_a_broken_pyproject_that_speaks_of_us_is_an_error_and_another_is_not(deep: Path) -> None:
    path = write(deep / "pyproject.toml", "[tool.snapcore]\nrepo = ")
    with pytest.raises(SnapshotError) as caught:
        find_settings(str(deep))
    assert str(path) in caught.value.message
    for wrong in ("[[tool.snapcore]]\nrepo = 'p'", "\ufeff[tool.snapcore]\nrepo = 'p'"):
        write(path, wrong)
        with pytest.raises(SnapshotError):
            find_settings(str(deep))
    write(path, "[project\n")
    assert find_settings(str(deep)) is None


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(deep: Path, in_time: None) -> None:
    path = deep / "snapcore.toml"
    os.mkfifo(path)
    reads: tuple[tuple[Callable[[str], object], str], ...] = (
        (find_settings, str(deep)),
        (load_settings, str(path)),
        (load_settings, "/dev/zero"),
    )
    for read, place in reads:
        with pytest.raises(SnapshotError, match="no regular file") as caught:
            read(place)
        assert "--no-config" in caught.value.hint
    path.unlink()
    path.mkdir()
    with pytest.raises(SnapshotError, match=r"snapcore\.toml"):
        find_settings(str(deep))
    os.mkfifo(deep.parent / "pyproject.toml")
    assert repo_of(deep.parent) is None


def test_a_file_that_is_too_large_is_refused(deep: Path) -> None:
    path = write(deep / "snapcore.toml", b"#" * MAX_FILE_BYTES)
    assert load_settings(str(path)).settings == Settings()
    write(path, b"#" * (MAX_FILE_BYTES + 1))
    assert "larger than 1 MiB" in refusal(path).message


def test_a_missing_file_is_an_error_only_when_it_was_named(deep: Path) -> None:
    assert find_settings(str(deep)) is None
    assert "cannot be read" in refusal(deep / "none.toml").message
    (deep / "snapcore.toml").symlink_to("nowhere")
    with pytest.raises(SnapshotError, match="cannot be read"):
        find_settings(str(deep))


# ---- trust


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the file belong to another user, or this process run as another, whichever this process may do."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)


@pytest.mark.parametrize(("name", "text"), [("snapcore.toml", ""), ("pyproject.toml", "[tool.snapcore]")])
def test_a_found_file_of_another_user_is_refused(deep: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    path = write(deep / name, text)
    assert find_settings(str(deep)) is not None
    give_away(path, monkeypatch)
    with pytest.raises(SnapshotError, match="another user") as caught:
        find_settings(str(deep))
    assert "--config" in caught.value.hint
    assert load_settings(str(path)).named


def test_a_link_of_another_user_to_a_file_of_ones_own_is_refused(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write(deep / "mine.toml", "repo = 'elsewhere'")
    link = deep / "snapcore.toml"
    link.symlink_to(target)
    assert repo_of(deep) == "elsewhere"
    give_away(link, monkeypatch)
    with pytest.raises(SnapshotError, match="another user"):
        find_settings(str(deep))


def test_a_file_of_root_is_not_another_users(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(deep / "snapcore.toml", "repo = 'r'")
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert repo_of(deep) == "r"


def test_only_a_named_file_may_lead_to_a_command(deep: Path) -> None:
    path = write(deep / "snapcore.toml", "")
    found = find_settings(str(deep))
    assert found is not None
    for address in ("exec:kubectl exec -i pod -- /w", " exec:x /w"):
        with pytest.raises(SnapshotError, match=r"jobs\.a\.sandbox") as caught:
            check_sandbox_address(found, address, "jobs.a.sandbox")
        assert str(path) in caught.value.hint
        check_sandbox_address(load_settings(str(path)), address, "jobs.a.sandbox")
    for address in ("./exec:x", "docker://box", "ssh://host/w"):
        check_sandbox_address(found, address, "jobs.a.sandbox")


# ---- reading

WHOLE = """
repo = "store"
database = "postgresql://db/x"
thread = "thread-1"
progress = "plain"
[policy]
include = ["src/"]
exclude = ["*.log", "tmp/"]
everything = true
with-git = true
keep-rebuildable = true
on-unsupported = "skip"
on-unreadable = "skip"
on-torn = "keep"
on-limit = "skip"
max-files = 1
max-file-bytes = 2
max-total-bytes = 3
cross-mounts = true
[secrets]
A = { env = "A_TOKEN" }
B = { file = "b.txt" }
C = { command = "print-it now" }
D = { command = ["print-it", "now"] }
[jobs.one]
sandbox = "."
every = "15min"
[jobs.one.secrets]
E = { env = "E" }
"""


def test_a_whole_file_is_read(deep: Path) -> None:
    settings = load_settings(str(write(deep / "any-name.toml", WHOLE))).settings
    assert (settings.repo, settings.database, settings.thread, settings.progress) == (
        "store",
        "postgresql://db/x",
        "thread-1",
        "plain",
    )
    assert settings.policy.policy() == FilePolicy(
        include=["src/"],
        exclude=["*.log", "tmp/"],
        defaults=False,
        keep_git=True,
        keep_rebuildable=True,
        on_unsupported="skip",
        on_unreadable="skip",
        on_torn="keep",
        on_limit="skip",
        max_files=1,
        max_file_bytes=2,
        max_total_bytes=3,
        cross_mounts=True,
    )
    assert settings.secrets == {
        "A": SecretSource(env="A_TOKEN"),
        "B": SecretSource(file="b.txt"),
        "C": SecretSource(command="print-it now"),
        "D": SecretSource(command=("print-it", "now")),
    }
    assert settings.jobs["one"].secrets == {"E": SecretSource(env="E")}
    project = deep / "pyproject.toml"
    write(project, "".join(f"[tool.snapcore.{line[1:]}\n" if line[:1] == "[" else f"{line}\n" for line in WHOLE.splitlines()))
    project.write_text("[tool.snapcore]\n" + project.read_text())
    assert load_settings(str(project)).settings == settings


def test_an_empty_file_sets_nothing(deep: Path) -> None:
    assert load_settings(str(write(deep / "snapcore.toml", "# nothing\n"))).settings == Settings()
    assert Settings().policy.policy() == FilePolicy()


REFUSED = [
    ("repos = 'x'", "repos"),
    ("[policy]\nmax_files = 1", "policy.max_files"),
    ("[cron]\nzone = 'UTC'", "cron.zone"),
    ("[jobs.nightly]\nevry = '1h'", "jobs.nightly.evry"),
    ("[jobs]\nnightly = 5", "jobs.nightly"),
    ("repo = 5", "repo"),
    ("repo = ''", "repo"),
    ("thread = ['a']", "thread"),
    ("thread = 2026-01-01", "thread"),
    (f"progress = '{CANARY}'", "progress"),
    (f"[policy]\nexclude = '{CANARY}'", "policy.exclude"),
    ("[policy]\nexclude = ['a', 3]", "policy.exclude[1]"),
    ("[policy]\nexclude = ['']", "policy.exclude[0]"),
    (f"[policy]\non-torn = '{CANARY}'", "policy.on-torn"),
    (f"[policy]\neverything = '{CANARY}'", "policy.everything"),
    ("[policy]\nmax-files = 0", "policy.max-files"),
    ("[policy]\nmax-files = true", "policy.max-files"),
    ("policy = 1", "policy"),
    (f"[secrets]\nTOKEN = '{CANARY}'", "secrets.TOKEN"),
    (f"[secrets]\nTOKEN = ['{CANARY}']", "secrets.TOKEN"),
    (f"[jobs.j.secrets]\nTOKEN = '{CANARY}'", "jobs.j.secrets.TOKEN"),
    (f"[secrets]\nTOKEN = {{ value = '{CANARY}' }}", "secrets.TOKEN.value"),
    (f"[secrets]\nTOKEN = {{ env = 'A', file = '{CANARY}' }}", "secrets.TOKEN"),
    ("[secrets]\nTOKEN = {}", "secrets.TOKEN"),
    ("[secrets]\nTOKEN = { env = '' }", "secrets.TOKEN.env"),
    (f"[secrets]\nTOKEN = {{ command = ['{CANARY}', 1] }}", "secrets.TOKEN.command[1]"),
    (f"secrets = '{CANARY}'", "secrets"),
]


@pytest.mark.parametrize(("text", "key"), REFUSED)
def test_what_is_not_understood_is_refused_by_file_and_key_and_without_its_value(deep: Path, text: str, key: str) -> None:
    path = write(deep / "snapcore.toml", text)
    error = refusal(path)
    assert str(path) in error.message
    assert key in error.message.replace(str(path), "")
    assert CANARY not in str(error)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("thred = 'x'", "Did you mean thread?"),
        ("[policy]\nmax_files = 1", "Did you mean max-files?"),
        ("progress = 'loud'", "progress takes one of auto, plain, none."),
        ("[jobs.j.policy]\non-torn = 'skip'", "jobs.j.policy.on-torn takes one of error, keep."),
    ],
)
def test_a_slip_of_the_pen_is_told_what_was_meant(deep: Path, text: str, told: str) -> None:
    assert told in refusal(write(deep / "snapcore.toml", text)).message


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (f"[secrets]\nTOKEN = {CANARY}", "at line 2"),
        (f"repo = 'a'\nrepo = '{CANARY}'\n", "at line 2"),
        (f"repo = '{CANARY}", "at its end"),
        (f"repo = '{CANARY}\x01'", "at line 1"),
        (f'repo = "{CANARY}\\q"', "at line 1"),
        ("repo = " + "[" * 100_000, "not valid TOML"),
        ("max = " + "1" * 5000, "not valid TOML"),
        (f"\n\nrepo = '{CANARY}".encode() + b"\xff'", "at line 3"),
        (b"\xff\xfer\0e\0", "not UTF-8"),
    ],
)
def test_what_is_no_toml_is_refused_by_file_and_line_and_without_its_text(deep: Path, text: str | bytes, where: str) -> None:
    path = write(deep / "snapcore.toml", text)
    error = refusal(path)
    assert str(path) in error.message
    assert where in error.message
    assert CANARY not in str(error)


names = st.text(string.ascii_letters + "-_", min_size=1, max_size=12)
values = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.just(CANARY) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
known = st.sampled_from([*(field.encode_name for field in msgspec.structs.fields(Settings)), "other"])


@given(st.dictionaries(known, values, max_size=4))
def test_no_value_of_a_file_is_in_an_error_whatever_is_written(tmp_path_factory: pytest.TempPathFactory, table: Any) -> None:
    path = tmp_path_factory.mktemp("settings") / "snapcore.toml"
    path.write_bytes(_toml(table).encode())
    told = ""
    try:
        load_settings(str(path))
    except SnapshotError as error:
        told = str(error)
    assert CANARY not in told


def _toml(table: dict[str, Any]) -> str:
    return "".join(f"{_inline(key)} = {_inline(value)}\n" for key, value in table.items())


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_inline(key)} = {_inline(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower()


# ---- places


def test_places_in_a_file_are_relative_to_its_folder(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/dev")
    loaded = load_settings(str(write(deep / "snapcore.toml", "")))
    for written, meant in {
        "store": f"{deep}/store",
        "./store": f"{deep}/store",
        ".": str(deep),
        "../store": f"{deep}/../store",
        "/srv/store": "/srv/store",
        "~/store": "/home/dev/store",
        "file:///srv/store": "/srv/store",
        "s3://bucket/prefix": "s3://bucket/prefix",
        "s3:bucket": "s3:bucket",
        "memory://": "memory://",
        "docker://box/w": "docker://box/w",
        "exec:env -i /w": "exec:env -i /w",
        "a:b": f"{deep}/a:b",
    }.items():
        assert loaded.address(written) == meant
    for written, meant in {
        "sqlite:///own.db": f"sqlite:///{deep}/own.db",
        "sqlite:///sub/own.db?timeout=5": f"sqlite:///{deep}/sub/own.db?timeout=5",
        "sqlite:////srv/own.db": "sqlite:////srv/own.db",
        "sqlite://": "sqlite://",
        "sqlite:///:memory:": "sqlite:///:memory:",
        "postgresql://db/x": "postgresql://db/x",
    }.items():
        assert loaded.database(written) == meant


def test_a_folder_with_odd_names_is_no_part_of_a_databases_options(tmp_path: Path) -> None:
    folder = tmp_path / "50% off?"
    folder.mkdir()
    loaded = load_settings(str(write(folder / "snapcore.toml", "")))
    assert loaded.database("sqlite:///own.db") == f"sqlite:///{tmp_path}/50%25 off%3F/own.db"


def test_every_option_of_a_policy_can_be_written_down() -> None:
    options = {"defaults": "everything", "keep_git": "with_git"}
    written = {field.name for field in msgspec.structs.fields(PolicySettings)}
    assert {options.get(name, name) for name in FilePolicy.__dataclass_fields__} == written
