"""Symbolic links: those that stay in the workspace are kept as they are, those that leave it are refused or skipped, and
none is ever followed."""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from snapcore.errors import Code, SnapshotError
from snapcore.model import FileStat
from snapcore.protocols import ScanSelection, Stage, StageWrite, Step, SwapReport
from snapcore.providers.direct import DirectWorkspace
from snapcore.repository import Repository
from snapcore.selection import FilePolicy
from snapcore.testing.trees import compare_trees

Make = Callable[..., Path]
SKIP = FilePolicy(on_unsupported="skip")


@pytest.fixture
def tree(make: Make) -> Path:
    """Some files to link to, and a secret outside."""
    work = make({"file": "x", "folder/inner": "y", "folder/deep/": ""})
    (work.parent / "outside").mkdir()
    (work.parent / "outside" / "secret").write_text("not ours")
    (work.parent / "work-too").mkdir()  # its name begins as the root's does
    return work


KEPT = {
    "relative": "file",
    "to-folder": "folder",
    "up-and-down": "folder/../file",
    "through-itself": "../work/file",
    "dangling": "no/such/file",
    "dangling-up": "folder/../none",
    "loop": "loop",
    "dot": ".",
    "folder/parent": "..",
    "folder/deep/up": "../../file",
    "to-a-link": "relative",
    "folder/through-a-link": "../to-folder/inner",
    "trailing-slash": "folder/",
    "odd \udcff\n": "file\udcfe\n",
}


@pytest.mark.parametrize("name", KEPT)
async def test_links_that_stay_inside_are_kept_as_they_are(memory_repo: Repository, tree: Path, name: str) -> None:
    """Case 8: kept, never followed. A relative link that climbs out and names the workspace again is not portable."""
    os.symlink(KEPT[name], tree / name)
    if name == "to-a-link":
        os.symlink("file", tree / "relative")
    if name == "folder/through-a-link":
        os.symlink("folder", tree / "to-folder")
    if name == "through-itself":
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.capture(tree, thread_id="t")
        assert caught.value.code == Code.UNSUPPORTED_ENTRY
        return
    target = tree.parent / "target"
    await memory_repo.capture(tree, thread_id="t")
    await memory_repo.restore(target, thread_id="t")
    assert os.readlink(target / name) == KEPT[name]
    assert compare_trees(tree, target) == []


@pytest.mark.parametrize("tail", ["", "/", "/file", "/folder/inner", "/folder/../file", "/none", "//file", "/./file"])
async def test_an_absolute_link_into_the_root_follows_the_root(memory_repo: Repository, tree: Path, tail: str) -> None:
    """Case 9: the round trip works, and where the root is another, the link leads into that one."""
    os.symlink(f"{tree}{tail}", tree / "link")
    target = tree.parent / "target"
    await memory_repo.capture(tree, thread_id="t")
    await memory_repo.restore(target, thread_id="t")
    assert Path(os.readlink(target / "link")).resolve() == Path(f"{target}{tail}").resolve()
    assert str(tree) + "/" not in os.readlink(target / "link") + "/"
    receipt = await memory_repo.restore(tree, thread_id="t")
    assert receipt is not None
    again = await memory_repo.restore(target, thread_id="t")
    assert again is not None
    assert again.changed == 0


def plant(tree: Path, name: str, target: str) -> None:
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    os.symlink(target.replace("{outside}", str(tree.parent / "outside")).replace("{root}", str(tree)), tree / name)


LEAVING = {
    "absolute file": [("link", "{outside}/secret")],
    "absolute folder": [("link", "{outside}")],
    "system": [("link", "/etc/passwd")],
    "the root of all": [("link", "/")],
    "relative": [("link", "../outside/secret")],
    "relative, deep": [("folder/deep/link", "../../../outside")],
    "absolute, out by dots": [("link", "{root}/../outside")],
    "a sibling with the same beginning": [("link", "{root}-too")],
    "dangling": [("link", "../nothing/there")],
    "through another link": [("link", "step/../../outside"), ("step", "folder/deep")],
    "dots taken where a link leads": [("link", "step/../../../outside"), ("step", "folder/deep")],
    "into a link that leaves": [("link", "step/secret"), ("step", "../outside")],
}


def leaving(tree: Path, kind: str) -> list[bytes]:
    """Make the links; the paths of those that leave the workspace."""
    for name, target in LEAVING[kind]:
        plant(tree, name, target)
    out = []
    for name, _ in LEAVING[kind]:
        real = os.path.realpath(tree / name)
        if real != str(tree) and not real.startswith(f"{tree}/"):
            out.append(os.fsencode(name))
    return sorted(out)


@pytest.mark.parametrize("kind", LEAVING)
async def test_links_that_leave_the_workspace_are_refused(memory_repo: Repository, tree: Path, kind: str) -> None:
    """Case 8: every one is named, with what to do, and nothing is stored."""
    offending = leaving(tree, kind)
    if not offending:  # the kernel stays inside: so may the link
        await memory_repo.capture(tree, thread_id="t")
        return
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(tree, thread_id="t")
    assert caught.value.code == Code.UNSUPPORTED_ENTRY
    assert sorted(caught.value.paths) == offending
    assert "skip" in caught.value.hint
    assert "xclude" in caught.value.hint
    assert await memory_repo.get("t") is None


@pytest.mark.parametrize("kind", LEAVING)
async def test_a_skipped_link_is_listed_and_stays_where_it_is(memory_repo: Repository, tree: Path, kind: str) -> None:
    """Cases 9 and 10: `skip` keeps all the rest, lists the link, and a restore does not touch it nor what it leads to."""
    offending = leaving(tree, kind)
    report = await memory_repo.capture_with_report(tree, thread_id="t", policy=SKIP)
    assert sorted(skipped.path for skipped in report.skipped) == offending
    assert all("leaves the workspace" in skipped.reason for skipped in report.skipped)
    before = {path: os.readlink(os.fsencode(tree) + b"/" + path) for path in offending}
    (tree / "file").write_text("changed")
    (tree / "new").write_text("to be removed")
    receipt = await memory_repo.restore(tree, thread_id="t")
    assert receipt is not None
    assert sorted(receipt.kept) == offending
    assert (tree / "file").read_text() == "x"
    assert not (tree / "new").exists()
    assert {path: os.readlink(os.fsencode(tree) + b"/" + path) for path in offending} == before
    assert (tree.parent / "outside" / "secret").read_text() == "not ours"


async def test_every_offending_link_is_named_at_once(memory_repo: Repository, tree: Path) -> None:
    for number in range(40):
        os.symlink("/etc", tree / f"out-{number:02}")
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(tree, thread_id="t")
    assert caught.value.paths == tuple(b"out-%02d" % number for number in range(40))
    assert "out-00" in str(caught.value)
    assert "20 more" in str(caught.value)


async def test_an_excluded_link_may_lead_anywhere(memory_repo: Repository, tree: Path) -> None:
    os.symlink("/etc", tree / "out")
    report = await memory_repo.capture_with_report(tree, thread_id="t", policy=FilePolicy.patterns(exclude=["/out"]))
    assert report.skipped == ()
    await memory_repo.restore(tree, thread_id="t")
    assert os.readlink(tree / "out") == "/etc"


async def test_a_link_may_be_restored_without_what_keeps_it_inside(memory_repo: Repository, tree: Path) -> None:
    """Alone it would lead out: it is written as captured, and verified as such."""
    os.symlink("folder/deep", tree / "step")
    os.symlink("step/../../file", tree / "link")
    await memory_repo.capture(tree, thread_id="t")
    target = tree.parent / "target"
    for _ in range(2):
        receipt = await memory_repo.restore(target, thread_id="t", paths=["link"])
        assert receipt is not None
        assert os.listdir(target) == ["link"]
        assert os.readlink(target / "link") == "step/../../file"
    await memory_repo.restore(target, thread_id="t")
    assert (target / "link").read_text() == "x"


# ---- links that were planted where a restore has to write


async def planted(memory_repo: Repository, tree: Path) -> Path:
    """A checkpoint of the tree; then `folder` becomes a link to a folder outside that has files of the same names."""
    await memory_repo.capture(tree, thread_id="t")
    outside = tree.parent / "outside"
    (outside / "inner").write_text("not ours either")
    (outside / "deep").mkdir()
    (outside / "deep" / "extra").write_text("and this")
    (tree / "folder").rename(tree.parent / "old-folder")
    return outside


async def test_a_folder_that_became_a_link_is_not_written_through(memory_repo: Repository, tree: Path) -> None:
    """Case 11: the link is replaced by the folder; what it led to is as it was."""
    outside = await planted(memory_repo, tree)
    (tree / "folder").symlink_to(outside)
    receipt = await memory_repo.restore(tree, thread_id="t")
    assert receipt is not None
    assert not (tree / "folder").is_symlink()
    assert (tree / "folder" / "inner").read_text() == "y"
    assert (outside / "inner").read_text() == "not ours either"
    assert (outside / "deep" / "extra").read_text() == "and this"
    assert sorted(os.listdir(outside)) == ["deep", "inner", "secret"]


@pytest.mark.parametrize("paths", [["folder"], ["folder/inner"], [b"folder/deep"]])
async def test_a_restore_of_some_paths_does_not_go_through_a_planted_link(
    memory_repo: Repository, tree: Path, paths: Sequence[bytes | str]
) -> None:
    """Case 11, with `paths`."""
    outside = await planted(memory_repo, tree)
    (tree / "folder").symlink_to(outside)
    await memory_repo.restore(tree, thread_id="t", paths=paths)
    assert (outside / "inner").read_text() == "not ours either"
    assert sorted(os.listdir(outside)) == ["deep", "inner", "secret"]
    assert not (tree / "folder").is_symlink()


@pytest.mark.parametrize("inside", ["file", "folder/", "/folder//deep/", "./folder/../file", "no/such//"])
async def test_an_absolute_link_into_the_root_is_kept_as_it_was_written(memory_repo: Repository, tree: Path, inside: str) -> None:
    """And follows the root when it is restored elsewhere."""
    os.symlink(f"{tree}/{inside}", tree / "link")
    await memory_repo.capture(tree, thread_id="t")
    receipt = await memory_repo.restore(tree, thread_id="t")
    assert receipt is not None
    assert (receipt.added, receipt.changed, receipt.removed) == (0, 0, 0)
    assert os.readlink(tree / "link") == f"{tree}/{inside}"
    target = tree.parent / "target"
    await memory_repo.restore(target, thread_id="t")
    assert os.readlink(target / "link") == f"{target}/{inside}"


class PlantingWorkspace(DirectWorkspace):
    """Lets a test change the tree at a step of a restore."""

    def __init__(self, root: Path, when: str, plant: Callable[[], None]) -> None:
        super().__init__(root)
        self._when = when
        self._plant = plant

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        async for batch in super().scan(selection, cross_mounts=cross_mounts):
            yield batch
        self.at("scanned")

    async def open_stage(self) -> Stage:
        return PlantingStage(await super().open_stage(), self)

    def at(self, step: str) -> None:
        if step == self._when:
            self._when = ""
            self._plant()


class PlantingStage:
    def __init__(self, inner: Stage, workspace: PlantingWorkspace) -> None:
        self._inner = inner
        self._workspace = workspace

    async def write(self, writes: Sequence[StageWrite]) -> None:
        await self._inner.write(writes)
        self._workspace.at("staged")

    async def log(self, steps: Sequence[Step]) -> None:
        await self._inner.log(steps)

    async def seal(self, *, durable: bool) -> None:
        await self._inner.seal(durable=durable)
        self._workspace.at("sealed")

    async def swap(self) -> SwapReport:
        return await self._inner.swap()

    async def abort(self) -> None:
        await self._inner.abort()


@pytest.mark.parametrize("when", ["scanned", "staged", "sealed"])
@pytest.mark.parametrize("name", ["folder", "folder/deep"])
async def test_a_link_planted_during_a_restore_is_not_written_through(
    memory_repo: Repository, make: Make, when: str, name: str
) -> None:
    """Case 11, in the middle: the restore fails or does the rest, but writes and removes nothing outside."""
    work = make({"folder/inner": "y", "folder/deep/more": "z"})
    outside = make({"inner": "keep", "deep/more": "keep", "more": "keep", "extra": "keep"}, base=work.parent / "outside")
    await memory_repo.capture(work, thread_id="t")
    make({"folder/inner": "changed", "folder/deep/more": "changed", "folder/extra": "1", "folder/deep/extra": "2"})

    def swap_for_a_link() -> None:
        (work / name).rename(work.parent / "moved-away")
        (work / name).symlink_to(outside)

    workspace = PlantingWorkspace(work, when, swap_for_a_link)
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.restore(workspace, thread_id="t")
    assert caught.value.code == Code.VERIFY_FAILED
    assert {path.relative_to(outside).as_posix(): path.read_text() for path in outside.rglob("*") if path.is_file()} == {
        "inner": "keep",
        "deep/more": "keep",
        "more": "keep",
        "extra": "keep",
    }
    receipt = await memory_repo.restore(work, thread_id="t", verify="content")
    assert receipt is not None
    assert (work / "folder" / "deep" / "more").read_text() == "z"
    assert not (work / "folder" / "extra").exists()
