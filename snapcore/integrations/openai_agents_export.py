"""A checkpoint as a workspace tar that the OpenAI Agents SDK hydrates a sandbox from.

Their rules, as `agents/sandbox/util/tar_utils.py` of openai-agents 0.24.0 has them: folders, files and symbolic links only, no
path twice, none with a backslash, no link whose target is absolute or leads above the root as it is written. So the names of
one file become files of their own, a link that was absolute into the root becomes relative, and what they would refuse, and
with it the whole archive, is left out.

The place of every byte is known from the manifest, so that contents are fetched in the order of the packs.
"""

import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import IO, Final, cast

import msgspec

from snapcore.contents import ContentStager, FileTask
from snapcore.engine import Engine
from snapcore.errors import Code, SnapshotError
from snapcore.manifest import page_totals
from snapcore.model import Checkpoint, Entry, Kind, RootState, Totals
from snapcore.protocols import Stage, StageFile, StageWrite
from snapcore.providers.archive import temporary_room
from snapcore.providers.docker_tar import TAR_END, header_of, padding
from snapcore.providers.threads import in_thread
from snapcore.records import RecordReader
from snapcore.redaction import Redactor
from snapcore.restoring import pinned
from snapcore.target import LOAD_PAGES, load_target
from snapcore.transfer_export import member_target

__all__ = ["Export", "export_tar", "refusal"]

RECORD: Final = 10_240  # tar's own: archives are filled up to a multiple of it


class Export(msgspec.Struct, frozen=True):
    """A tar in a file of this host, at its beginning, and what it leaves out: (path, reason)."""

    file: IO[bytes]
    left_out: tuple[tuple[bytes, str], ...] = ()
    still_redacted: tuple[bytes, ...] = ()


def refusal(entry: Entry) -> str:
    """Why the SDK would refuse an archive with this entry, empty when it would not."""
    if b"\\" in entry.path:
        return "a name with a backslash"
    if entry.kind == Kind.LINK and not _stays_inside(entry.path, member_target(entry)):
        return "a link that leads out of the workspace as it is written"
    return ""


def _stays_inside(path: bytes, target: bytes) -> bool:
    """Whether a target, taken as it is written, stays below the root at every step."""
    if target.startswith(b"/"):
        return False
    depth = path.count(b"/")
    for part in target.split(b"/"):
        if part == b"..":
            depth -= 1
        elif part not in (b"", b"."):
            depth += 1
        if depth < 0:
            return False
    return True


async def export_tar(engine: Engine, checkpoint: Checkpoint, *, reinject: Redactor | None = None) -> Export:
    """The tree of a checkpoint with one root as a tar. Every byte was checked; `reinject` puts the present values of its secrets
    back. Raises `SnapshotError`: `INVALID_REQUEST` for several roots, `MISSING_BLOB`, `INVALID_BLOB`, `INVALID_PATH`;
    `RepositoryError` `STORE_FULL` when this host has no room for it."""
    if len(checkpoint.roots) != 1:
        raise SnapshotError(
            f"Checkpoint {checkpoint.id} has {len(checkpoint.roots)} roots; a sandbox of the OpenAI Agents SDK has one.",
            code=Code.INVALID_REQUEST,
        )
    file = tempfile.TemporaryFile(prefix="snapcore-")  # noqa: SIM115 (whoever gets it closes it)
    try:
        async with pinned(engine, checkpoint):
            with temporary_room():
                return await _Exporter(engine, checkpoint.roots[0], file, reinject).run()
    except BaseException:
        file.close()
        raise


class _Exporter:
    def __init__(self, engine: Engine, root: RootState, file: IO[bytes], reinject: Redactor | None) -> None:
        self._reader = RecordReader(engine)
        self._root = root
        self._file = file
        self._sink = _Sink(file.fileno())
        self._stager = ContentStager(engine, self._reader, cast("Stage", self._sink), owners=True, reinject=reinject)
        self._end = 0
        self._left_out: list[tuple[bytes, str]] = []
        self._met = Totals()
        self._expected = 0

    async def run(self) -> Export:
        target = await load_target(self._reader, self._root)
        ids = [page.page_id for page in target.pages]
        for start in range(0, len(ids), LOAD_PAGES):
            part = ids[start : start + LOAD_PAGES]
            found = await target.entries(part)
            await self._add([entry for page_id in part for entry in found[page_id]])
            self._count(found.values())
        self._check_count()
        await in_thread(self._finish)
        return Export(self._file, tuple(self._left_out), tuple(sorted(self._stager.still_redacted)))

    async def _add(self, entries: Sequence[Entry]) -> None:
        kept = []
        for entry in entries:
            why = refusal(entry)
            if why:
                self._left_out.append((entry.path, why))
            else:
                kept.append(entry)
        tasks = await in_thread(self._write_headers, kept)
        if tasks:
            await self._stager.write(tasks)

    def _write_headers(self, entries: Sequence[Entry]) -> list[FileTask]:
        """Write the headers where they belong; the files that are to be filled in, in the places that the sink now knows."""
        tasks: list[FileTask] = []
        places: dict[bytes, int] = {}
        for entry in entries:
            header = header_of(
                b"./" + entry.path if entry.path else b".",
                entry.kind,
                mode=entry.mode,
                mtime_ns=entry.mtime_ns,
                size=entry.size,
                owner=(entry.uid, entry.gid),
                link=member_target(entry) if entry.kind == Kind.LINK else b"",
            )
            _write_at(self._file.fileno(), header, self._end)
            self._end += len(header)
            if entry.kind == Kind.FILE and entry.size:
                places[entry.path] = self._end
                tasks.append(FileTask(entry.path, entry))
                self._end += entry.size + len(padding(entry.size))
                self._expected += entry.size
        self._sink.places = places
        return tasks

    def _count(self, pages: Iterable[Sequence[Entry]]) -> None:
        for page in map(page_totals, pages):
            met = self._met
            self._met = Totals(met.files + page.files, met.folders + page.folders, met.links + page.links, met.bytes + page.bytes)

    def _check_count(self) -> None:
        if self._met != self._root.totals or self._sink.bytes != self._expected:
            raise SnapshotError("The checkpoint does not hold what its record says.", code=Code.INVALID_BLOB)

    def _finish(self) -> None:
        _write_at(self._file.fileno(), TAR_END, self._end)
        end = self._end + len(TAR_END)
        os.ftruncate(self._file.fileno(), end + -end % RECORD)
        self._file.seek(0)


class _Sink:
    """What a `ContentStager` writes into: of `Stage` only `write`, and into the archive."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.places: dict[bytes, int] = {}
        self.bytes = 0

    async def write(self, writes: Sequence[StageWrite]) -> None:
        """Write pieces of files into their places. Called side by side."""
        await in_thread(self._write, writes)
        self.bytes += sum(len(write.data) for write in writes if isinstance(write, StageFile))

    def _write(self, writes: Sequence[StageWrite]) -> None:
        for write in writes:
            if isinstance(write, StageFile):
                _write_at(self._fd, write.data, self.places[write.staged] + write.offset)


def _write_at(fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
