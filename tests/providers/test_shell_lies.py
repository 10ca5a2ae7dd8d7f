"""A sandbox that cuts, repeats, alters, floods or stalls what it answers: typed errors, and never a shorter tree (case 23).

The doubles here stand for the sandbox itself: they run the real tools and then lie.
"""

import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType

import pytest

from snapcore.errors import Code, ProviderError, SnapcoreError, SnapshotError
from snapcore.model import FileStat, Kind
from snapcore.providers import shell_rows, shell_tools
from snapcore.providers.command_shell import CommandPipe, CommandShell
from snapcore.providers.shell import ShellWorkspace
from snapcore.sandboxes import ExecResult
from snapcore.testing.trees import make_tree
from snapcore.testing.workspace_suite import read_all, scan_all

from .shell_kinds import make_shell

Lie = Callable[[bytes], bytes]


class LyingPipe:
    def __init__(self, pipe: CommandPipe, lie: Lie, piece: int) -> None:
        self.pipe = pipe
        self.lie = lie
        self.piece = piece

    async def __aenter__(self) -> "LyingPipe":
        await self.pipe.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.pipe.__aexit__(kind, error, trace)

    async def stdout(self) -> AsyncIterator[bytes]:
        said = self.lie(b"".join([piece async for piece in self.pipe.stdout()]))
        for at in range(0, len(said), self.piece):
            yield said[at : at + self.piece]

    async def wait(self) -> ExecResult:
        return await self.pipe.wait()


class LyingShell:
    """Tells the truth until `lie` is set."""

    def __init__(self, shell: CommandShell, *, piece: int = 1 << 20) -> None:
        self.shell = shell
        self.sandbox_id = shell.sandbox_id
        self.piece = piece
        self.lie: Lie = bytes

    def pipe(self, script: str, stdin: bytes | AsyncIterator[bytes] = b"") -> LyingPipe:
        return LyingPipe(self.shell.pipe(script, stdin), self.lie, self.piece)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "workspace"
    make_tree(root, files=12)
    return root


@pytest.fixture(params=["gnu", "busybox"])
def shell(request: pytest.FixtureRequest) -> LyingShell:
    return LyingShell(make_shell(request.param))


def files_of(found: list[FileStat]) -> list[FileStat]:
    return [entry for entry in found if entry.kind == Kind.FILE and not entry.note]


async def test_an_answer_that_comes_byte_by_byte_is_the_same(root: Path) -> None:
    for kind in ("gnu", "busybox"):
        found = await scan_all(ShellWorkspace(make_shell(kind), str(root)))
        files = [file for file in files_of(found) if file.size < 10_000]
        slow = ShellWorkspace(LyingShell(make_shell(kind), piece=1), str(root))
        assert await scan_all(slow) == found
        read = await read_all(slow, files)
        assert [(bytes(data), last.after) for data, last in read] == [
            ((root / file.path.decode("utf-8", "surrogateescape")).read_bytes(), file) for file in files
        ]


async def test_a_scan_that_is_cut_anywhere_is_an_error(root: Path, shell: LyingShell) -> None:
    workspace = ShellWorkspace(shell, str(root))
    sizes: list[int] = []

    def measure(said: bytes) -> bytes:
        sizes.append(len(said))
        return said

    await scan_all(workspace)  # its tools are known from here on
    shell.lie = measure
    await scan_all(workspace)
    for at in {0, 1, 100, *range(0, sizes[0] - 1, sizes[0] // 40), sizes[0] - 1}:
        shell.lie = lambda said, at=at: said[:at]  # type: ignore[misc]
        with pytest.raises(ProviderError) as caught:
            await scan_all(workspace)
        assert caught.value.code == Code.SANDBOX_UNAVAILABLE
        assert caught.value.retryable


async def test_a_read_that_is_cut_anywhere_is_an_error(root: Path, shell: LyingShell) -> None:
    workspace = ShellWorkspace(shell, str(root))
    files = [file for file in files_of(await scan_all(workspace)) if file.size < 100_000]
    sizes: list[int] = []

    def measure(said: bytes) -> bytes:
        sizes.append(len(said))
        return said

    shell.lie = measure
    await read_all(workspace, files)
    for at in {0, 1, 100, *range(0, sizes[0] - 1, sizes[0] // 40), sizes[0] - 1}:
        shell.lie = lambda said, at=at: said[:at]  # type: ignore[misc]
        with pytest.raises(ProviderError) as caught:
            await read_all(workspace, files)
        assert caught.value.retryable


async def test_parts_that_are_lost_in_the_middle_or_repeated_never_pass_for_the_whole(root: Path, shell: LyingShell) -> None:
    workspace = ShellWorkspace(shell, str(root))
    truth = await scan_all(workspace)
    files = files_of(truth)
    read_truth = [bytes(data) for data, _ in await read_all(workspace, files)]
    dice = random.Random(7)

    def lose(said: bytes) -> bytes:
        at = dice.randrange(len(said))
        return said[:at] + said[at + dice.randrange(1, 5_000) :]

    def repeat(said: bytes) -> bytes:
        at = dice.randrange(len(said))
        return said[: at + dice.randrange(1, 5_000)] + said[at:]

    for lie in [lose, repeat] * 15:
        shell.lie = lie
        try:
            read = await read_all(workspace, files)
        except ProviderError:
            continue
        for file, (data, last), whole in zip(files, read, read_truth, strict=True):
            assert last.problem or last.after != file or len(data) == len(whole)


async def test_altered_answers_are_typed_errors_or_plain_lies(root: Path, shell: LyingShell) -> None:
    """What a sandbox says of its contents is its own affair. It must not make the host fail in ways of its own choosing."""
    workspace = ShellWorkspace(shell, str(root))
    files = files_of(await scan_all(workspace))
    dice = random.Random(11)

    def alter(said: bytes) -> bytes:
        out = bytearray(said)
        for _ in range(dice.choice([1, 3, 50])):
            out[dice.randrange(len(out))] = dice.choice(b"\0/.\xff01239 -")
        return bytes(out)

    shell.lie = alter
    codes: set[Code] = set()
    for _ in range(40):
        fresh = ShellWorkspace(shell, str(root))
        for act in (scan_all(workspace), scan_all(fresh), read_all(workspace, files)):
            try:
                await act
            except SnapcoreError as error:
                codes.add(error.code)
    assert Code.SANDBOX_UNAVAILABLE in codes
    assert codes <= {Code.SANDBOX_UNAVAILABLE, Code.INVALID_PATH, Code.MISSING_TOOL, Code.INVALID_WORKSPACE}


RECORD = b"nf 644 1 1700000000.0 1700000000.0 %d 1 1 0 0\0\0%s\0"


@pytest.mark.parametrize(
    ("records", "code"),
    [
        (RECORD % (7, b"../outside"), Code.SANDBOX_UNAVAILABLE),
        (RECORD % (7, b"/etc/passwd"), Code.INVALID_PATH),
        (RECORD % (7, b"sub/../../outside"), Code.SANDBOX_UNAVAILABLE),
        (RECORD % (7, b".."), Code.INVALID_PATH),
        (RECORD % (7, b"a//b"), Code.INVALID_PATH),
        (RECORD % (7, b"trailing/"), Code.INVALID_PATH),
        (RECORD % (7, b"twice") * 2, Code.SANDBOX_UNAVAILABLE),
        (RECORD % (7, b"file") + RECORD % (8, b"file/under"), Code.SANDBOX_UNAVAILABLE),
        (RECORD % (7, b"no/parent"), Code.SANDBOX_UNAVAILABLE),
        (RECORD % (7, b""), Code.SANDBOX_UNAVAILABLE),
        (RECORD.replace(b" 644 1 ", b" 644 -1 ") % (7, b"x"), Code.SANDBOX_UNAVAILABLE),
        (RECORD.replace(b" 644 1 ", b" 644 9223372036854775808 ") % (7, b"x"), Code.SANDBOX_UNAVAILABLE),
        (RECORD.replace(b" 644 1 ", b" 644 " + b"9" * 5000 + b" ") % (7, b"x"), Code.SANDBOX_UNAVAILABLE),
        (RECORD.replace(b" 644 ", b" 99999 ") % (7, b"x"), Code.SANDBOX_UNAVAILABLE),
        (RECORD.replace(b"nf", b"nq") % (7, b"x"), Code.SANDBOX_UNAVAILABLE),
        (RECORD.replace(b"nf", b"") % (7, b"x"), Code.SANDBOX_UNAVAILABLE),
        (RECORD % (2**64, b"x"), Code.SANDBOX_UNAVAILABLE),
        (RECORD % (7, b"x" * 300_000), Code.SANDBOX_UNAVAILABLE),
    ],
)
async def test_records_of_what_cannot_be_are_refused(tmp_path: Path, records: bytes, code: Code) -> None:
    shell = LyingShell(make_shell("gnu"))
    root = tmp_path / "workspace"
    root.mkdir()
    workspace = ShellWorkspace(shell, str(root))

    def insert(said: bytes) -> bytes:
        end = said.rindex(b"\0", 0, said.rindex(b"\0", 0, len(said) - 2))
        return said[: end + 1] + records + said[end + 1 :]

    shell.lie = insert
    with pytest.raises(SnapcoreError) as caught:
        await scan_all(workspace)
    assert caught.value.code == code


@pytest.mark.parametrize("flood", [b"x", b"\0", b"\0\0\0x\0", RECORD % (7, b"endless")])
async def test_a_flood_is_stopped(tmp_path: Path, flood: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_rows, "MAX_SCAN", 10 << 20)
    (tmp_path / "file").write_text("x")
    shell = LyingShell(make_shell("gnu"))
    workspace = ShellWorkspace(shell, str(tmp_path))
    files = files_of(await scan_all(workspace))
    whole = flood * ((60 << 20) // len(flood))
    for lie in (lambda said: whole, lambda said: said[:-100] + whole, lambda said: said + whole, lambda said: said[:70] + whole):
        shell.lie = lie
        for act in (scan_all(workspace), scan_all(ShellWorkspace(shell, str(tmp_path))), read_all(workspace, files)):
            with pytest.raises((ProviderError, SnapshotError)):
                await act


async def test_a_sandbox_that_falls_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    workspace = ShellWorkspace(make_shell("gnu"), str(tmp_path))
    files = files_of(await scan_all(workspace))
    monkeypatch.setattr(shell_tools, "STALL_SECONDS", 0.1)
    silent = ShellWorkspace(CommandShell(["sh", "-c", "sleep 1000"], "silent"), str(tmp_path))
    for act in (scan_all(silent), silent.clock(), read_all(silent, files)):
        with pytest.raises(ProviderError) as caught:
            await act
        assert caught.value.code == Code.SANDBOX_UNAVAILABLE


async def test_contents_that_do_not_fit_their_stat_are_not_taken_for_whole(root: Path, shell: LyingShell) -> None:
    (root / "secret.txt").write_bytes(b"abcdefgh" * 100)
    workspace = ShellWorkspace(shell, str(root))
    files = [file for file in files_of(await scan_all(workspace)) if file.path == b"secret.txt"]
    shell.lie = lambda said: said.replace(b"abcdefgh", b"", 3)
    try:
        ((data, last),) = await read_all(workspace, files)
    except ProviderError:
        return
    assert last.problem or (len(data) == 800 and last.after == files[0])
