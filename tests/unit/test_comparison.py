"""What can be held of the comparison with others: no claim without a mark, no mark without what it stands for, and numbers,
versions and facts about installed packages that are what the page says."""

import ast
import asyncio
import inspect
import io
import os
import re
import tarfile
import tomllib
from datetime import date
from pathlib import Path

import pytest

from snapcore.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comparison.md"
TEXT = PAGE.read_text("utf-8")
MARK = re.compile(r"\[\[([A-Z]\d+)\]\]")
OTHERS = {
    "TanStack AI": "T",
    "alineo": "A",
    "Rebuno": "R",
    "OpenAI Agents SDK": "O",
    "E2B": "E",
    "Modal": "M",
    "Daytona": "D",
    "restic": "B",
}
DEFINED = dict(re.findall(r"^\[([A-Z]\d+)\]: (\S+)$", TEXT, re.MULTILINE))


def tables() -> dict[str, list[list[str]]]:
    """The rows of each heading's table, without the heads."""
    found: dict[str, list[list[str]]] = {}
    for part in re.split(r"^#{2,3} ", TEXT, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in body.splitlines() if line.startswith("|")]
        if rows:
            assert {len(row) for row in rows} == {len(rows[0])}, f"{title}: a row has more or fewer cells than its head"
            found[title] = rows[2:]
    return found


TABLES = tables()
FEATURES = {title: rows for title, rows in TABLES.items() if any(row[0] == "**snapcore**" for row in rows)}
SHOWN = {row[0].strip("[]"): (row[1].strip("`"), row[2].strip("`")) for row in TABLES["What shows it"]}
SOURCES = {
    row[0].strip("[]"): row[1:]
    for rows in TABLES.values()
    if rows[0][0] in {f"[{letter}1]" for letter in OTHERS.values()}
    for row in rows
}
EVERYBODY = ["**snapcore**", *OTHERS]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- every claim has a mark


def test_all_are_in_every_table() -> None:
    assert len(FEATURES) == 10
    for title, rows in FEATURES.items():
        expected = EVERYBODY[:5] if title == "Sessions" else EVERYBODY
        assert [row[0] for row in rows] == expected, title


@pytest.mark.parametrize("title", FEATURES)
def test_every_claim_names_what_shows_it(title: str) -> None:
    for name, *cells in FEATURES[title]:
        letter = "S" if name == "**snapcore**" else OTHERS[name]
        for cell in cells:
            marks = MARK.findall(cell)
            if letter != "S" and cell == "not stated":
                continue
            assert cell.endswith("]]"), f"{name}: something is claimed after the last mark: {cell}"
            own = [mark for mark in marks if mark[0] == letter or (SHOWN.get(mark, ("",))[0] == "docs/benchmarks.md")]
            assert own, f"{name}: {cell}"


def test_marks_are_defined_and_used() -> None:
    used = set(MARK.findall(TEXT))
    assert used == set(DEFINED) == set(SHOWN) | set(SOURCES)


def test_no_list_has_a_mark_twice() -> None:
    lines = re.findall(r"^\[([A-Z]\d+)\]: |^\| \[([A-Z]\d+)\] ", TEXT, re.MULTILINE)
    defined, listed = [a for a, _ in lines if a], [b for _, b in lines if b]
    assert len(defined) == len(set(defined))
    assert len(listed) == len(set(listed))


# ---- what is said of snapcore


@pytest.mark.parametrize("mark", SHOWN)
def test_what_shows_it_is_there(mark: str) -> None:
    where, test = SHOWN[mark]
    path, _, anchor = where.partition("#")
    assert (PAGE.parent / DEFINED[mark].partition("#")[0]).resolve() == (ROOT / path).resolve()
    assert DEFINED[mark].partition("#")[2] == anchor
    assert (ROOT / path).is_file(), path
    if anchor:
        assert anchor in anchors(ROOT / path)
    if test:
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def row(title: str, name: str) -> str:
    return next(" | ".join(cells) for first, *cells in FEATURES[title] if first == name)


def test_numbers_are_those_of_the_benchmarks() -> None:
    measured: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "benchmarks.md").read_text("utf-8").splitlines():
        if line.startswith("| "):
            work, *values = [cell.strip() for cell in line[1:-1].split("|")]
            measured.setdefault(work, values)  # the first table that has it
    works = ("first capture", "nothing changed", "15 files changed", "restore, empty folder")
    mine, theirs = ([measured[work][column].removesuffix(" s") for work in works] for column in (0, 1))
    assert re.findall(r"\d+\.\d+", row("Speed and size", "**snapcore**")) == mine
    assert re.findall(r"\d+\.\d+", row("Speed and size", "restic")) == theirs
    worse = " ".join(TEXT.partition("## Where snapcore is worse")[2].split())
    first, restore = measured["first capture"], measured["restore, empty folder"]
    assert f"first captures take {first[4]} of restic's time (target {first[6]}), or {first[5]} in memory" in worse
    assert f"a restore into an empty folder {restore[4]}, or {restore[5]} in memory (target {restore[6]})" in worse


def test_numbers_of_containers_are_those_of_the_benchmarks() -> None:
    part = (ROOT / "docs" / "benchmarks.md").read_text("utf-8").partition("## In a container")[2]
    capture, copy = (re.search(rf"^\| {work} \| ([\d.]+) ", part, re.MULTILINE) for work in ("first capture", "`docker cp`"))
    assert capture
    assert copy
    assert f"a first capture takes {capture[1]} s where `docker cp` takes {copy[1]} s" in " ".join(TEXT.split())


def test_snapcore_is_what_the_page_calls_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert row("Licence and maturity", "**snapcore**").startswith(f"{project['license']} [[")
    assert f"| {project['version']}, the first release; alpha" in row("Licence and maturity", "**snapcore**")
    assert "Development Status :: 3 - Alpha" in project["classifiers"]


def test_what_is_said_to_be_lacking_is_lacking() -> None:
    assert "mount" not in COMMANDS


# ---- what is said of others


@pytest.mark.parametrize("mark", SOURCES)
def test_a_source_has_an_address_a_version_and_a_day(mark: str) -> None:
    what, version, read = SOURCES[mark]
    address = DEFINED[mark]
    assert what
    assert address.startswith("https://")
    assert date.fromisoformat(read)
    in_a_repository = re.search(r"github\.com/[^/]+/[^/]+/(?:blob|tree)/([^/]+)/", address)
    if in_a_repository:
        assert re.fullmatch("[0-9a-f]{40}", in_a_repository[1]), "a branch shows something else tomorrow"
        assert version == in_a_repository[1][:7]
    elif version == "page":
        assert read
    else:
        assert re.fullmatch(r"\d+(\.\d+)+", version)
        if "pypi.org" in address or "npmjs.com" in address:
            assert f"/{version}" in address


@pytest.mark.parametrize(("name", "mark"), [(row[0], MARK.findall(row[2])) for row in FEATURES["Licence and maturity"][1:]])
def test_a_version_is_that_of_a_source(name: str, mark: list[str]) -> None:
    versions = re.findall(r"\b\d+\.\d+\.\d+\b", row("Licence and maturity", name))
    assert versions
    if name != "alineo":  # whose sources are commits
        assert set(versions) <= {SOURCES[one][1] for one in mark}


def test_a_snapshot_of_the_openai_agents_sdk_is_one_archive_that_is_written_over(tmp_path: Path) -> None:
    """What is said of its local folder, and of its archives: no times, no group or other write, no setuid, no hard links."""
    from agents.sandbox.snapshot import LocalSnapshot
    from agents.sandbox.util.tar_utils import UnsafeTarMemberError, safe_extract_tarfile

    async def save() -> bytes:
        snapshot = LocalSnapshot(id="session", base_path=tmp_path / "snapshots")
        for content in (b"first", b"second"):
            await snapshot.persist(io.BytesIO(content))
        with await snapshot.restore() as stream:
            data = stream.read()
        assert isinstance(data, bytes)
        return data

    assert asyncio.run(save()) == b"second"
    assert os.listdir(tmp_path / "snapshots") == ["session.tar"]

    def archive(*members: tarfile.TarInfo) -> tarfile.TarFile:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for member in members:
                tar.addfile(member, io.BytesIO(bytes(member.size)))
        data.seek(0)
        return tarfile.open(fileobj=data)

    file, link = tarfile.TarInfo("run"), tarfile.TarInfo("hard")
    file.mode, file.mtime = 0o6777, 1_000_000_000
    link.type, link.linkname = tarfile.LNKTYPE, "run"
    with archive(file) as tar:
        safe_extract_tarfile(tar, root=tmp_path / "out")
    assert (tmp_path / "out" / "run").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "out" / "run").stat().st_mtime > 1_500_000_000
    with archive(file, link) as tar, pytest.raises(UnsafeTarMemberError):
        safe_extract_tarfile(tar, root=tmp_path / "linked")


def test_nothing_in_the_openai_agents_sdk_removes_old_archives() -> None:
    import agents

    name = "cleanup_stale_default_local_snapshots"
    package = Path(inspect.getfile(agents)).parent
    assert [path.name for path in package.rglob("*.py") if name in path.read_text("utf-8")] == ["snapshot_defaults.py"]


def test_the_clients_of_others_have_what_is_said_of_them() -> None:
    from e2b import AsyncSandbox
    from rebuno import CheckpointPolicy, step

    assert inspect.signature(CheckpointPolicy).parameters["every_steps"].default == 1
    assert "at_most_once" in (step.__doc__ or "")
    for method in ("create_snapshot", "list_snapshots", "delete_snapshot", "fork", "pause"):
        assert callable(getattr(AsyncSandbox, method))
