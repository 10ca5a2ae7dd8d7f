"""Restore through the archive API: staged on this host, then sent into an empty or absent root as one tar stream."""

import asyncio
import os
import posixpath
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Final, Literal

import msgspec

from snapcore.errors import Code, ProviderError, SnapshotError, printable
from snapcore.model import Kind, path_key
from snapcore.protocols import (
    PlaceStep,
    RemoveStep,
    SetMetaStep,
    StageFile,
    StageFolder,
    StageHardLink,
    StageLink,
    StageWrite,
    Step,
    SwapReport,
)

from .docker_tar import TAR_END, TarReader, header_of, padding
from .docker_users import user_ids
from .journal import check_step
from .threads import uncancelled

if TYPE_CHECKING:
    from .docker_archive import ArchiveWorkspace

__all__ = ["ArchiveStage", "open_stage"]

PIECE: Final = 1 << 20
MAX_HOPS: Final = 20
TOO_OLD: Final = "the engine's archive API sets no time before 1970"

_busy: set[tuple[str, str]] = set()
"""Roots that a restore of this process is at work on. Other processes are not seen: the API has no lock."""


class _Item(msgspec.Struct):
    """Something staged. A file's content begins at `offset` of the stage's own file."""

    kind: int
    mode: int = 0o755
    mtime_ns: int = 0
    owner: tuple[int, int] | None = None
    offset: int = 0
    size: int = 0
    target: bytes = b""
    first: bytes = b""


async def open_stage(workspace: "ArchiveWorkspace") -> "ArchiveStage":
    """A stage for a workspace whose root is empty or absent; `NOT_CAPABLE` for any other."""
    key = (workspace.container.sandbox_id, workspace.root)
    if key in _busy:
        raise ProviderError("Another restore into this container is running.", code=Code.WORKSPACE_BUSY, retryable=True)
    _busy.add(key)
    try:
        root, absent = await workspace.engine.run(_look, workspace)
        workspace.staging(absent=absent)
        return ArchiveStage(workspace, root, absent, key)
    except BaseException:
        _busy.discard(key)
        raise


def _look(workspace: "ArchiveWorkspace") -> tuple[str, bool]:
    """The root's own path, links resolved, and whether it is absent. Raises when it is there and not empty."""
    engine, container, root = workspace.engine, workspace.container, workspace.root
    for _ in range(MAX_HOPS):
        found = engine.stat(container.id, root)
        if found is None:
            return root, True
        if found.is_folder:
            break
        if not found.is_link or not found.linkTarget.startswith("/"):
            raise SnapshotError(f"{printable(root)} is no folder of the container.", code=Code.INVALID_WORKSPACE)
        root = posixpath.normpath(found.linkTarget)
    mounts = workspace.mounts()[0]
    with engine.get_archive(container.id, root.rstrip("/") + "/.") as (_, pieces):
        reader = TarReader(pieces)
        prefix: bytes | None = None
        for member in reader.members():
            if prefix is None:
                prefix = member.name.rstrip(b"/") + b"/"
                continue
            path = member.name[len(prefix) :].rstrip(b"/")
            if not any(path == mount or path.startswith(mount + b"/") or mount.startswith(path + b"/") for mount in mounts):
                raise ProviderError(
                    f"{printable(workspace.root)} is not empty, and through the engine's archive API alone nothing in it can be"
                    " replaced or removed.",
                    code=Code.NOT_CAPABLE,
                    hint="Restore into a fresh container, or into a running one that has sh, find and tar.",
                )
    return root, False


class ArchiveStage:
    """See `Stage`. Nothing is sent before `swap`; then all of it is, in one transfer, which is not atomic."""

    def __init__(self, workspace: "ArchiveWorkspace", root: str, absent: bool, key: tuple[str, str]) -> None:
        self._workspace = workspace
        self._root = root
        self._absent = absent
        self._key = key
        self._state: Literal["open", "sealed", "swapping", "done"] = "open"
        self._mutex = asyncio.Lock()
        self._data: IO[bytes] = tempfile.TemporaryFile(prefix="snapcore-docker-")  # noqa: SIM115 (closed by _close)
        self._end = 0
        self._items: dict[bytes, _Item] = {}
        self._places: dict[bytes, bytes] = {}
        self._metas: dict[bytes, SetMetaStep] = {}

    def __del__(self) -> None:
        self._data.close()

    async def write(self, writes: Sequence[StageWrite]) -> None:
        """See `Stage.write`: into a file of this host."""
        async with self._mutex:
            self._expect("open")
            await self._workspace.engine.run(self._write, writes)

    async def log(self, steps: Sequence[Step]) -> None:
        """See `Stage.log`. A removal is `NOT_CAPABLE`: it is known before anything was touched."""
        async with self._mutex:
            self._expect("open")
            for step in steps:
                check_step(step)
                if isinstance(step, RemoveStep):
                    raise ProviderError(
                        f"{printable(step.path)} cannot be removed through the engine's archive API.", code=Code.NOT_CAPABLE
                    )
                if isinstance(step, PlaceStep):
                    self._places[step.staged] = step.path
                else:
                    self._metas[step.path] = step

    async def seal(self, *, durable: bool) -> None:
        """See `Stage.seal`. There is nothing to make durable: the container is untouched so far."""
        async with self._mutex:
            self._expect("open")
            self._state = "sealed"

    async def swap(self) -> SwapReport:
        """See `Stage.swap`. When it raises, part of the tree may have been written into what was an empty root."""
        return await uncancelled(self._swap())

    async def abort(self) -> None:
        """See `Stage.abort`."""
        async with self._mutex:
            if self._state != "done":
                self._workspace.staging(absent=False)
            self._close()

    # ---- staging

    def _write(self, writes: Sequence[StageWrite]) -> None:
        for write in writes:
            if isinstance(write, StageFile):
                self._write_piece(write)
            elif isinstance(write, StageFolder):
                self._items[write.staged] = _Item(Kind.DIR, 0o700, time.time_ns())
            elif isinstance(write, StageLink):
                self._items[write.staged] = _Item(Kind.LINK, 0o777, write.mtime_ns, write.owner, target=write.target)
            else:
                assert isinstance(write, StageHardLink)
                self._items[write.staged] = _Item(Kind.FILE, first=write.first)

    def _write_piece(self, file: StageFile) -> None:
        item = self._items.get(file.staged)
        if item is None:
            item = self._items[file.staged] = _Item(Kind.FILE, offset=self._end, size=file.size)
            self._end += file.size
        data, at = memoryview(file.data), item.offset + file.offset
        while data:
            written = os.pwrite(self._data.fileno(), data, at)
            data, at = data[written:], at + written
        if file.last:
            # without owners=True nothing gets the rights of whoever it belongs to
            item.mode = file.mode if file.owner is not None else file.mode & ~(stat.S_ISUID | stat.S_ISGID)
            item.mtime_ns, item.owner = file.mtime_ns, file.owner

    # ---- sending

    async def _swap(self) -> SwapReport:
        async with self._mutex:
            self._expect("sealed")
            self._state = "swapping"
            try:
                placed = self._placed()
                undone = [(path, "missing") for path in self._metas if path and path not in placed]
                engine, container = self._workspace.engine, self._workspace.container
                ids = await engine.run(user_ids, engine, container.id, container.user)
                base = self._base()
                # asked beforehand: the engine answers nothing about a container that it unpacks into
                parents = await engine.run(self._missing_parents, base) if self._absent else []
                await engine.run(engine.put_archive, container.id, base, self._stream(placed, parents, base, ids))
            finally:
                self._state = "done"
                self._close()
            undone += [(path, TOO_OLD) for path, item in placed.items() if item.mtime_ns < 0 and item.kind == Kind.FILE]
            exact = {path: item.mtime_ns for path, item in placed.items() if item.mtime_ns % 1_000_000_000}
            self._workspace.staging(absent=False, written=exact)
            return SwapReport(tuple(undone))

    def _placed(self) -> dict[bytes, _Item]:
        """What comes into the tree, by path; the root is among it when its metadata is set or it is not there yet."""
        placed: dict[bytes, _Item] = {}
        homes: dict[bytes, bytes] = {}
        if self._absent or b"" in self._metas:
            placed[b""] = _Item(Kind.DIR, 0o755, time.time_ns())
        for staged, item in self._items.items():
            top, slash, rest = staged.partition(b"/")
            home = self._places.get(staged)
            if home is None and top in self._places:
                home = self._places[top] + slash + rest
            if home is not None:
                placed[home], homes[staged] = item, home
        for item in placed.values():
            if item.first:
                item.first = homes[item.first]
        for path, meta in self._metas.items():
            if path in placed:
                item = placed[path]
                item.mode = item.mode if meta.mode is None else meta.mode
                item.mtime_ns = item.mtime_ns if meta.mtime_ns is None else meta.mtime_ns
                item.owner = item.owner if meta.owner is None else meta.owner
        for item in placed.values():
            if item.first:  # the engine sets what a name's own header says, for all names of the file
                first = placed[item.first]
                item.mode, item.mtime_ns, item.owner = first.mode, first.mtime_ns, first.owner
        return placed

    def _base(self) -> str:
        """Where the stream is unpacked: at `/`, so that a link may lead anywhere inside the container; in a container whose own
        files are read-only, at the mount that the root lies on."""
        container = self._workspace.container
        if not container.read_only:
            return "/"
        mounts = [mount.decode("utf-8", "surrogateescape") for mount in container.mounts]
        under = [mount for mount in mounts if self._root == mount or self._root.startswith(mount.rstrip("/") + "/")]
        return max(under, key=len, default="/")

    def _stream(self, placed: dict[bytes, _Item], parents: Sequence[bytes], base: str, ids: tuple[int, int]) -> Iterator[bytes]:
        """The tar stream. What has no owner of its own belongs to the container's user `ids`."""
        below = posixpath.relpath(self._root, base)
        root = b"" if below == "." else below.encode("utf-8", "surrogateescape")

        def name(path: bytes) -> bytes:
            return b"/".join(part for part in (root, path) if part)

        for parent in parents:
            yield header_of(parent, Kind.DIR, mode=0o755, mtime_ns=time.time_ns(), owner=ids)
        # names of one file come last: what they name is there then
        order = sorted(placed, key=lambda path: (bool(placed[path].first), path_key(path)))
        for path in order:
            item = placed[path]
            if not name(path):
                continue  # the mount itself: its own metadata cannot be set
            yield header_of(
                name(path),
                item.kind,
                mode=item.mode,
                mtime_ns=item.mtime_ns,
                size=0 if item.first else item.size,
                owner=item.owner or ids,
                link=name(item.first) if item.first else item.target,
                hardlink=bool(item.first),
            )
            if item.kind == Kind.FILE and not item.first:
                done = 0
                while done < item.size:
                    data = os.pread(self._data.fileno(), min(PIECE, item.size - done), item.offset + done)
                    data = data or bytes(min(PIECE, item.size - done))  # zeros at the end were left as a hole
                    done += len(data)
                    yield data
                yield padding(item.size)
        yield TAR_END

    def _missing_parents(self, base: str) -> list[bytes]:
        """The folders on the way from `base` to the root that are not there, relative to `base`."""
        engine, container = self._workspace.engine, self._workspace.container
        parts = posixpath.relpath(self._root, base).split("/")[:-1]
        paths = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        missing = (path for path in paths if engine.stat(container.id, posixpath.join(base, path)) is None)
        return [path.encode("utf-8", "surrogateescape") for path in missing]

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise SnapshotError(f"This restore is {self._state}, not {state}.", code=Code.INVALID_REQUEST)

    def _close(self) -> None:
        self._state = "done"
        _busy.discard(self._key)
        self._data.close()
