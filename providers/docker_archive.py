"""A container's files through the engine's archive API alone: stopped containers, images without any tool, and frozen ones.

The tree comes as one tar stream, which each scan keeps on this host until the next one; what is read later comes from there.
So what a scan of a frozen or stopped container shows and what is read is one state. What the API cannot do:

- times have whole seconds and there is no ctime, so every capture reads everything: this is not incremental;
- a file that changes while a running container is not frozen may come torn, and nothing shows it;
- sockets are not in the stream, nor is what lies in a tmpfs;
- nothing can be removed or replaced: only a root that is empty or absent can be restored into.
"""

import asyncio
import contextlib
import posixpath
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from snapcore.errors import Code, ProviderError, SnapshotError, printable
from snapcore.model import Capabilities, FileStat, Kind, validate_path
from snapcore.protocols import ReadBlock, SandboxClock, ScanSelection, Stage

from .docker_client import DockerEngine
from .docker_spool import Spool, SpoolFiller
from .docker_tar import TarReader
from .folders import STAGE_NAME
from .links import inside
from .stats import NOT_REGULAR, VANISHED

__all__ = ["ArchiveWorkspace", "Container"]

GRANULARITY_NS: Final = 1_000_000_000
READ_BYTES: Final = 8 << 20
READ_BLOCK: Final = 4 << 20
UNPAUSE_ATTEMPTS: Final = 8


class Container(msgspec.Struct, frozen=True):
    """What the archive API needs to know of a container: absolute `mounts`, those of them that it cannot see into
    (`hidden`, in memory), whether its root file system is read-only, and its user as it was configured."""

    id: str
    sandbox_id: str
    mounts: tuple[bytes, ...] = ()
    hidden: tuple[bytes, ...] = ()
    read_only: bool = False
    user: str = ""


class ArchiveWorkspace:
    """The files under `root` of a container. With `freeze` a running container is paused while a scan reads it."""

    def __init__(self, engine: DockerEngine, container: Container, root: str, *, freeze: bool = False) -> None:
        self._engine = engine
        self._container = container
        self._root = posixpath.normpath(root)
        if not self._root.startswith("/"):
            raise ProviderError(f"The workspace root {printable(root)!r} is not an absolute path.", code=Code.NOT_CAPABLE)
        self._freeze = freeze
        self._spool: Spool | None = None
        self._absent = False  # a stage is open, and there is no root yet
        self._written: dict[bytes, int] = {}

    @property
    def root(self) -> str:
        """The root's path in the container."""
        return self._root

    @property
    def sandbox_id(self) -> str:
        """`docker://` with the engine's id and the container's."""
        return self._container.sandbox_id

    @property
    def host_path(self) -> str | None:
        """None: it is not on this host, as far as can be known."""
        return None

    @property
    def capabilities(self) -> Capabilities:
        """Times of whole seconds without ctime; restore in one transfer that is not atomic."""
        return Capabilities(
            time_granularity_ns=GRANULARITY_NS, symlinks=True, hard_links=True, modes=True, mtimes=True, owners=True
        )

    async def clock(self) -> SandboxClock:
        """This host's clock: nothing that it stamps is trusted later."""
        return SandboxClock(time.time_ns(), GRANULARITY_NS)

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        """See `Workspace.scan`. The whole stream is kept first."""
        if self._absent:
            yield [FileStat(b"", Kind.DIR, 0o755, mtime_ns=time.time_ns())]
            return
        spool = await self._kept(selection, cross_mounts)
        self._spool = spool
        batches = spool.batches(self._written)
        while batch := await self._engine.run(next, batches, None):
            yield batch

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        """See `Workspace.read`: as the last scan kept them; what it did not show is asked for one by one."""
        batch: list[ReadBlock] = []
        size = 0
        folders: set[bytes] = {b""}
        for index, file in enumerate(files):
            kept = self._spool.find(file) if self._spool is not None else None
            if self._spool is not None and kept is not None:
                spool, offset, done = self._spool, kept, 0
                while True:
                    data = await self._engine.run(spool.read, offset + done, min(READ_BLOCK, file.size - done))
                    last = done + len(data) >= file.size
                    batch.append(ReadBlock(index, done, data, last, file if last else None))
                    done += len(data)
                    size += len(data)
                    if size >= READ_BYTES:
                        yield batch
                        batch, size = [], 0
                    if last:
                        break
                continue
            if batch:
                yield batch
                batch, size = [], 0
            async for block in self._read_one(index, file, folders):
                yield [block]
        if batch:
            yield batch

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Only recovers."""
        await self.recover()
        yield

    async def recover(self) -> Literal["", "swept", "finished"]:
        """Nothing can be finished through the archive API: `RESTORE_BLOCKED` when a restore by other means was cut short."""
        journal = f"{self._root}/{STAGE_NAME.decode()}/journal"
        if await self._engine.run(self._engine.stat, self._container.id, journal) is not None:
            raise SnapshotError(
                f"A restore into {printable(self._root)} was cut short, and cannot be finished in a container without tools.",
                code=Code.RESTORE_BLOCKED,
                paths=[STAGE_NAME],
                hint="Start the container and connect again; the next capture or restore then finishes it.",
            )
        return ""

    async def open_stage(self) -> Stage:
        """See `Workspace.open_stage`. `NOT_CAPABLE` unless the root is empty or absent."""
        from .docker_unpack import open_stage

        await self.recover()
        return await open_stage(self)

    # ---- for the stage

    @property
    def engine(self) -> DockerEngine:
        """The engine that has the container."""
        return self._engine

    @property
    def container(self) -> Container:
        """The container."""
        return self._container

    def staging(self, *, absent: bool, written: Mapping[bytes, int] | None = None) -> None:
        """Whether scans show a root that is not there yet as empty; `written` are the exact times of what a restore wrote, which
        scans show in place of their whole seconds."""
        self._absent = absent
        if written is not None:
            self._written = dict(written)

    def mounts(self) -> tuple[frozenset[bytes], frozenset[bytes]]:
        """Mount points below the root, relative to it, and those of them that the archive API does not see into."""
        root = self._root.encode("utf-8", "surrogateescape")
        every = (inside(path, root) for path in self._container.mounts)
        hidden = (inside(path, root) for path in self._container.hidden)
        return frozenset(path for path in every if path), frozenset(path for path in hidden if path)

    # ---- reading

    async def _kept(self, selection: ScanSelection, cross_mounts: bool) -> Spool:
        """The tree as it is now, kept. A cancelled caller waits until the container runs again."""
        stopped = threading.Event()
        mounts, hidden = self.mounts()
        filler = SpoolFiller(self._engine, self._container.id, self._root, selection, mounts, hidden, cross_mounts, stopped)

        def fill() -> Spool:
            with self._at_rest():
                return filler.run()

        task = asyncio.ensure_future(self._engine.run(fill))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stopped.set()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
            raise

    @contextlib.contextmanager
    def _at_rest(self) -> Iterator[None]:
        api, container = self._engine.api, self._container.id
        state = api.inspect_container(container)["State"] if self._freeze else {}
        if not state.get("Running") or state.get("Paused"):
            yield
            return
        try:
            api.pause(container)
            yield
        finally:
            self._unpause(api, container)

    def _unpause(self, api: Any, container: str) -> None:
        """Also when the connection just broke: it is tried for some 30 seconds."""
        from docker.errors import APIError, DockerException, NotFound
        from requests import RequestException

        for attempt in range(UNPAUSE_ATTEMPTS):
            try:
                api.unpause(container)
                return
            except NotFound:
                return
            except APIError:
                with contextlib.suppress(DockerException, RequestException):
                    if not api.inspect_container(container)["State"].get("Paused"):
                        return
            except RequestException:
                pass
            time.sleep(min(0.25 * 2**attempt, 8.0))
        raise ProviderError(
            "The Docker container was paused to be read and could not be unpaused.",
            hint=f"Run: docker unpause {container[:12]}",
            retryable=True,
        )

    async def _read_one(self, index: int, file: FileStat, folders: set[bytes]) -> AsyncIterator[ReadBlock]:
        try:
            if await self._below_a_link(file.path, folders):
                yield ReadBlock(index, 0, b"", last=True, problem=NOT_REGULAR)
                return
            async with self._engine.archive(self._container.id, self.path_of(file.path)) as (_, pieces):
                reader = TarReader(pieces)
                member = await self._engine.run(next, reader.members(), None)
                if member is None or member.kind != Kind.FILE:
                    yield ReadBlock(index, 0, b"", last=True, problem=NOT_REGULAR)
                    return
                content = reader.content()
                done = 0
                while done < file.size and (piece := await self._engine.run(next, content, b"")):
                    yield ReadBlock(index, done, piece[: file.size - done])
                    done += min(len(piece), file.size - done)
            after = msgspec.structs.replace(
                file, mode=member.mode, size=member.size, mtime_ns=member.mtime_ns, uid=member.uid, gid=member.gid
            )
            if self._written.get(file.path, 0) // GRANULARITY_NS == member.mtime_ns // GRANULARITY_NS:
                after = msgspec.structs.replace(after, mtime_ns=file.mtime_ns)
        except FileNotFoundError:
            yield ReadBlock(index, 0, b"", last=True, problem=VANISHED)
            return
        yield ReadBlock(index, done, b"", last=True, after=after)

    async def _below_a_link(self, path: bytes, folders: set[bytes]) -> bool:
        """Whether a parent is a link; `folders` are those that were looked at already."""
        parent = path.rpartition(b"/")[0]
        while parent not in folders:
            stat = await self._engine.run(self._engine.stat, self._container.id, self.path_of(parent))
            if stat is None:
                raise FileNotFoundError
            if not stat.is_folder:
                return True
            folders.add(parent)
            parent = parent.rpartition(b"/")[0]
        return False

    def path_of(self, path: bytes) -> str:
        """The absolute path of one below the root, as the engine takes it. A name that is not UTF-8 goes as it is, escaped."""
        validate_path(path)
        text = path.decode("utf-8", "surrogateescape")
        return posixpath.join(self._root, text)
