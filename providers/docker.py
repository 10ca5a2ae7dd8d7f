"""Docker containers as sandboxes: `docker://container`, `docker://container/folder`, with `?freeze=1` for one state of it all."""

import asyncio
import contextlib
import os
import posixpath
import re
import tempfile
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

from snapcore.errors import Code, ProviderError, SnapshotError, printable
from snapcore.model import Kind
from snapcore.protocols import Workspace
from snapcore.sandboxes import (
    Abilities,
    Binding,
    ExecResult,
    Hook,
    OutputCallback,
    SandboxHandle,
    SandboxSpec,
    argument_list,
    check_environment,
    check_path,
    run_hooks,
)

from .docker_archive import ArchiveWorkspace, Container
from .docker_client import DockerEngine
from .docker_shell import SAYS_PID, DockerPipe, DockerShell
from .docker_tar import TAR_END, TarReader, header_of, padding
from .docker_users import user_ids
from .processes import keeping

__all__ = ["DEFAULT_ROOT", "LABEL", "DockerProvider", "DockerSandbox", "DockerTemplate", "connect", "docker"]

DEFAULT_ROOT: Final = "/workspace"
LABEL: Final = "snapcore.sandbox"  # its value is the workspace root
PIECE: Final = 1 << 20
MAX_HOPS: Final = 20
# stays until it is told to stop, and then stops at once
KEEP_ALIVE: Final = ("sh", "-c", "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done")
# a command in the folder that is named, in the one where it is if that is "" or not there
RUN: Final = '[ -z "$1" ] || cd -- "$1" 2>/dev/null; shift; exec "$@"'

ABILITIES: Final = Abilities(create=True, destroy=True, pause=True, snapshot=True, exec=True, binary_pipes=True)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
_CONTAINER_OPTIONS: Final = frozenset({"command", "entrypoint", "hostname", "stop_signal", "platform", "domainname"})


class DockerSandbox:
    """An open container: a running one with `sh` in full, any other by the engine's archive API. What it is was looked at when
    it was opened; `freeze` is what `workspace` does unless told otherwise."""

    def __init__(
        self, engine: DockerEngine, found: Mapping[str, Any], root: str, *, has_shell: bool, freeze: bool = False, owned: bool
    ) -> None:
        self._engine = engine
        self._container = _describe(engine.id, found)
        state = found["State"]
        self._running = bool(state.get("Running")) and not state.get("Paused")
        self._has_shell = has_shell
        self._root = check_path(root)
        self._freeze = freeze
        self._owned = owned
        self._closed = False

    def __repr__(self) -> str:
        return f"DockerSandbox({self._container.id[:12]!r}, {self._root!r})"

    @property
    def sandbox_id(self) -> str:
        """`docker://` with the engine's id and the container's: a container that replaces another is another sandbox."""
        return self._container.sandbox_id

    @property
    def workspace_root(self) -> str:
        """The folder that is captured unless another is asked for."""
        return self._root

    @property
    def binding(self) -> Binding:
        """The container's id. Which engine has it is for whoever opens it to know."""
        return Binding("docker", self._container.id, self._root, {"freeze": "1"} if self._freeze else {})

    @property
    def abilities(self) -> Abilities:
        """All, of a running container; nothing runs in another."""
        return Abilities(True, True, True, True, exec=self._running, binary_pipes=self._running)

    def workspace(self, root: str | None = None, *, freeze: bool | None = None) -> Workspace:
        """The bulk view of the files under `root`. With `freeze` it is read whole while the container is paused, every time."""
        self._check_open()
        where = check_path(posixpath.join(self._root, root)) if root else self._root
        frozen = self._freeze if freeze is None else freeze
        if self._running and self._has_shell and not frozen:
            from .shell import ShellWorkspace

            return ShellWorkspace(DockerShell(self._engine, self._container.id, self.sandbox_id), where)
        return ArchiveWorkspace(self._engine, self._container, where, freeze=frozen)

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        on_output: OutputCallback | None = None,
        max_output: int = 16 << 20,
    ) -> ExecResult:
        """See `SandboxHandle.exec`. While there is no workspace root, commands start in the image's own folder for them. In an
        image without `sh` a command that takes too long is left behind, not ended."""
        words = argument_list(command)
        check_environment(environment or {})
        _check_text((*words, *(environment or {}).values(), cwd or "", user or ""))
        self._check_open()
        if self._has_shell:
            words = ["sh", "-c", SAYS_PID + RUN, "sh", "" if cwd else self._root, *words]
        kept, sink = keeping(max_output, on_output)
        pipe = DockerPipe(
            self._engine,
            self._container.id,
            words,
            stdin,
            user=user,
            cwd=await self._folder(cwd),
            environment=environment,
            says_pid=self._has_shell,
        )
        limit = asyncio.timeout(timeout)
        try:
            async with limit, pipe:
                async for stream, piece in pipe.output():
                    sink(stream, piece)
                code = (await pipe.wait()).exit_code
        except TimeoutError:
            if not limit.expired():
                raise  # of the caller's own `on_output`
            raise ProviderError(f"The command did not end within {timeout:g} seconds.", code=Code.EXEC_TIMEOUT) from None
        return kept.result(code)

    async def _folder(self, cwd: str | None) -> str | None:
        """Where the engine has to start a command; None where it does by itself, as with `sh`, which goes to the root then."""
        if cwd:
            return posixpath.join(self._root, cwd)
        if self._has_shell:
            return None
        there = await self._engine.run(self._engine.stat, self._container.id, self._root)
        return self._root if there is not None and (there.is_folder or there.is_link) else None

    async def upload(self, path: str, data: bytes | AsyncIterator[bytes]) -> None:
        """See `SandboxHandle.upload`. The folder has to be there. The file belongs to the container's user, with mode 0644."""
        target = check_path(path)
        self._check_open()
        if any(target == place or target.startswith(place + "/") for place in map(os.fsdecode, self._container.hidden)):
            raise ProviderError(
                f"{printable(target)} lies in the container's memory, where the engine's archive API does not reach.",
                code=Code.NOT_CAPABLE,
                hint="Send it through exec: handle.exec(['sh', '-c', 'cat > FILE'], stdin=...).",
            )
        engine, container = self._engine, self._container.id
        with tempfile.SpooledTemporaryFile(8 << 20) as spool:  # an archive says the size first
            if isinstance(data, bytes | bytearray | memoryview):
                spool.write(data)
            else:
                async for piece in data:
                    await engine.run(spool.write, piece)
            folder, name = posixpath.split(target)
            ids = await engine.run(user_ids, engine, container, self._container.user)
            await engine.run(engine.put_archive, container, folder, _one_file(name, spool, ids))

    async def download(self, path: str) -> AsyncIterator[bytes]:
        """See `SandboxHandle.download`. Links are followed, inside the container."""
        where = check_path(path)
        self._check_open()
        engine, container = self._engine, self._container.id
        for _ in range(MAX_HOPS):
            async with engine.archive(container, where) as (stat, pieces):
                if stat.is_link and stat.linkTarget.startswith("/"):
                    where = posixpath.normpath(stat.linkTarget)
                    continue
                if stat.is_folder:
                    raise IsADirectoryError(path)
                reader = TarReader(pieces)
                member = await engine.run(next, reader.members(), None)
                if member is None or member.kind != Kind.FILE:
                    raise ProviderError(f"{printable(path)} is no regular file.", code=Code.NOT_CAPABLE)
                content = reader.content()
                while piece := await engine.run(next, content, b""):
                    yield piece
                return
        raise ProviderError(f"{printable(path)} leads through too many links.", code=Code.NOT_CAPABLE)

    async def destroy(self) -> None:
        """Remove the container with its anonymous volumes, and close the handle."""
        await self._engine.run(_remove, self._engine, self._container.id)
        await self.close()

    async def close(self) -> None:
        """Release the connection. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._owned:
                await self._engine.close()

    @property
    def engine(self) -> DockerEngine:
        """The engine that has the container; `engine.traffic` counts what goes to and from it."""
        return self._engine

    def _check_open(self) -> None:
        if self._closed:
            raise ProviderError("The sandbox handle is closed.", code=Code.SANDBOX_UNAVAILABLE, hint="Open the sandbox again.")


class DockerProvider:
    """Containers of the engine that DOCKER_HOST, or the present Docker context, names. Its handles share one connection, which
    `close` releases. `environment` stands in for this process's variables (DOCKER_HOST and so on)."""

    def __init__(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        on_create: Sequence[Hook] = (),
        on_open: Sequence[Hook] = (),
    ) -> None:
        self._engine = DockerEngine(environment)
        self._on_create = tuple(on_create)
        self._on_open = tuple(on_open)

    @property
    def name(self) -> str:
        """`docker`."""
        return "docker"

    @property
    def abilities(self) -> Abilities:
        """All of them."""
        return ABILITIES

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        """See `SandboxProvider.create`. An image that the engine does not have is pulled. The container runs until it is stopped
        or destroyed; `options["command"]` is run instead, None for the image's own. Other options are `entrypoint`, `hostname`
        and those of the package's `create_host_config`: `binds`, `tmpfs`, `network_mode`, `read_only`, `cap_drop`, ..."""
        check_environment(spec.environment)
        if spec.timeout is not None:
            raise ProviderError("Docker containers do not end by themselves.", code=Code.NOT_CAPABLE, hint="Leave out timeout.")
        root = check_path(spec.workspace_root)
        engine = self._engine
        await engine.open()
        try:
            container = await engine.run(_create, engine, spec, root)
        except (ProviderError, SnapshotError) as error:
            raise _without(error, spec.environment) from None
        binding = Binding("docker", container, root)
        try:
            await engine.run(_start, engine, container, root)
            handle = await self._opened(binding)
        except BaseException:
            await self.destroy(binding)
            raise
        await run_hooks((*self._on_create, *self._on_open), handle, lambda: self.destroy(binding))
        return handle

    async def open(self, binding: Binding) -> DockerSandbox:
        """See `SandboxProvider.open`. A stopped container stays stopped: its files are reached through the archive API."""
        await self._engine.open()
        handle = await self._opened(binding, resume=True)
        await run_hooks(self._on_open, handle, handle.close)
        return handle

    async def pause(self, handle: SandboxHandle) -> None:
        """See `SandboxProvider.pause`: as `docker pause` does. A container that is paused already is no error."""
        engine, container = self._engine, handle.binding.sandbox_id
        await engine.open()

        def pause() -> None:
            if not engine.api.inspect_container(container)["State"].get("Paused"):
                engine.api.pause(container)

        await engine.run(pause)
        await handle.close()

    async def snapshot(self, handle: SandboxHandle) -> str:
        """See `SandboxProvider.snapshot`: an image, as `docker commit` makes it. It holds no volumes, and it does hold the
        environment that the container was made with."""
        engine, container = self._engine, handle.binding.sandbox_id
        await engine.open()
        return str((await engine.run(lambda: engine.api.commit(container)))["Id"])

    async def destroy(self, binding: Binding) -> None:
        """See `SandboxProvider.destroy`. Anonymous volumes go with it."""
        await self._engine.open()
        await self._engine.run(_remove, self._engine, _checked_name(binding.sandbox_id))

    async def list(self) -> "tuple[Binding, ...]":
        """The containers that a provider of snapcore made on this engine, running or not."""
        await self._engine.open()
        api = self._engine.api
        found = await self._engine.run(lambda: api.containers(all=True, filters={"label": LABEL}))
        return tuple(Binding("docker", str(each["Id"]), each["Labels"].get(LABEL) or DEFAULT_ROOT) for each in found)

    async def close(self) -> None:
        """Release the connection to the engine. Idempotent."""
        await self._engine.close()

    async def _opened(self, binding: Binding, *, resume: bool = False) -> DockerSandbox:
        found, has_shell = await self._engine.run(_inspect, self._engine, _checked_name(binding.sandbox_id), resume)
        freeze = binding.details.get("freeze") == "1"
        return DockerSandbox(self._engine, found, binding.workspace_root, has_shell=has_shell, freeze=freeze, owned=False)


class DockerTemplate:
    """Containers alike; see `docker`."""

    def __init__(self, provider: DockerProvider, spec: SandboxSpec) -> None:
        self.provider = provider
        self.spec = spec

    async def create(self) -> DockerSandbox:
        """A new container."""
        return await self.provider.create(self.spec)

    async def list(self) -> "tuple[Binding, ...]":
        """All containers that snapcore made on this engine."""
        return await self.provider.list()

    async def close(self) -> None:
        """Release the connection to the engine; the containers live on."""
        await self.provider.close()


def docker(*, on_create: Sequence[Hook] = (), on_open: Sequence[Hook] = (), **spec: Any) -> DockerTemplate:
    """`await docker(image="python:3.12").create()`: a template by the fields of `SandboxSpec` and hooks."""
    return DockerTemplate(DockerProvider(on_create=on_create, on_open=on_open), SandboxSpec(**spec))


async def connect(address: str) -> DockerSandbox:
    """The container at `docker://name-or-id[/root][?freeze=1]`; a paused one stays paused. Raises `SnapshotError`
    `INVALID_REQUEST` for another form of address."""
    parts = urllib.parse.urlsplit(address, allow_fragments=False)
    options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    freeze = options.pop("freeze", "0")
    if options or freeze not in ("0", "1"):
        raise SnapshotError(
            "A docker:// address knows one option, freeze=1.", code=Code.INVALID_REQUEST, hint="docker://container/root?freeze=1"
        )
    name = _checked_name(parts.netloc)
    root = os.fsdecode(urllib.parse.unquote_to_bytes(parts.path)) if parts.path.strip("/") else ""
    engine = DockerEngine()
    try:
        await engine.open()
        found, has_shell = await engine.run(_inspect, engine, name, False)
        root = root or (found["Config"].get("Labels") or {}).get(LABEL) or DEFAULT_ROOT
        return DockerSandbox(engine, found, root, has_shell=has_shell, freeze=freeze == "1", owned=True)
    except BaseException:
        await engine.close()
        raise


# ------------------------------------------------------------------------------------ calls on the engine's threads


def _inspect(engine: DockerEngine, container: str, resume: bool) -> tuple[dict[str, Any], bool]:
    """What a container is, and whether it has `sh`."""
    found: dict[str, Any] = engine.api.inspect_container(container)
    if resume and found["State"].get("Paused"):
        engine.api.unpause(container)
        found = engine.api.inspect_container(container)
    if not found["State"].get("Running"):
        return found, False
    environment = dict(text.partition("=")[::2] for text in found["Config"].get("Env") or [])
    folders = ["/bin", *environment.get("PATH", "/usr/bin:/usr/local/bin").split(":")[:16]]
    has_shell = any(engine.stat(found["Id"], f"{folder}/sh") is not None for folder in folders if folder.startswith("/"))
    return found, has_shell


def _create(engine: DockerEngine, spec: SandboxSpec, root: str) -> str:
    from docker.errors import ImageNotFound

    image = spec.snapshot or spec.image
    if image is None:
        raise SnapshotError("A Docker container needs an image.", code=Code.INVALID_REQUEST, hint="docker(image='python:3.12')")
    options = dict(spec.options)
    own = {name: options.pop(name) for name in _CONTAINER_OPTIONS & options.keys()}
    own.setdefault("command", list(KEEP_ALIVE))
    if own["command"] == list(KEEP_ALIVE):
        own.setdefault("entrypoint", [])
    if spec.cpus is not None:
        options["nano_cpus"] = round(spec.cpus * 1_000_000_000)
    if spec.memory_bytes is not None:
        options["mem_limit"] = spec.memory_bytes
    try:
        host = engine.api.create_host_config(**options)
    except TypeError:
        raise SnapshotError("An option is none that Docker knows.", code=Code.INVALID_REQUEST) from None
    try:
        engine.api.inspect_image(image)
    except ImageNotFound:
        if spec.snapshot is not None:
            raise ProviderError(f"The Docker engine has no snapshot {printable(image)}.", code=Code.NO_SANDBOX) from None
        engine.api.pull(image, tag=None if ":" in image.rpartition("/")[2] or "@" in image else "latest")
    created = engine.api.create_container(
        image,
        name=spec.name,
        user=spec.user,
        environment=dict(spec.environment),
        labels={**spec.labels, LABEL: root},
        host_config=host,
        **own,
    )
    return str(created["Id"])


def _start(engine: DockerEngine, container: str, root: str) -> None:
    """Start a container, its workspace root made before where it is not there: it belongs to the container's user."""
    missing: list[str] = []
    folder = root
    while folder != "/" and engine.stat(container, folder) is None:
        missing.append(folder)
        folder = posixpath.dirname(folder)
    if missing:
        now = time.time_ns()
        ids = user_ids(engine, container, str(engine.api.inspect_container(container)["Config"].get("User") or ""))
        headers = [header_of(os.fsencode(path[1:]), Kind.DIR, mode=0o755, mtime_ns=now, owner=ids) for path in reversed(missing)]
        engine.put_archive(container, "/", [*headers, TAR_END])
    engine.api.start(container)


def _remove(engine: DockerEngine, container: str) -> None:
    from docker.errors import APIError, NotFound

    try:
        engine.api.remove_container(container, force=True, v=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != 409 or "in progress" not in str(error.explanation):
            raise
        with contextlib.suppress(NotFound):
            engine.api.wait(container, condition="removed")


def _describe(engine_id: str, found: Mapping[str, Any]) -> Container:
    mounts = [str(mount["Destination"]) for mount in found.get("Mounts") or ()]
    host = found.get("HostConfig") or {}
    hidden = [*(host.get("Tmpfs") or {}), *(m["Destination"] for m in found.get("Mounts") or () if m.get("Type") == "tmpfs")]
    return Container(
        id=str(found["Id"]),
        sandbox_id=f"docker://{urllib.parse.quote(engine_id, safe=':')}/{found['Id']}",
        mounts=tuple(os.fsencode(posixpath.normpath(mount)) for mount in {*mounts, *hidden}),
        hidden=tuple(os.fsencode(posixpath.normpath(mount)) for mount in hidden),
        read_only=bool(host.get("ReadonlyRootfs")),
        user=str((found.get("Config") or {}).get("User") or ""),
    )


def _one_file(name: str, spool: "IO[bytes] | tempfile.SpooledTemporaryFile[bytes]", ids: tuple[int, int]) -> Iterator[bytes]:
    size = spool.seek(0, os.SEEK_END)
    spool.seek(0)
    yield header_of(os.fsencode(name), Kind.FILE, mode=0o644, mtime_ns=time.time_ns(), size=size, owner=ids)
    while piece := spool.read(PIECE):
        yield piece
    yield padding(size) + TAR_END


def _check_text(texts: Iterable[str]) -> None:
    """Refuse bytes that are no text, which the engine would replace: its requests are JSON."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        raise SnapshotError(
            "A command for a Docker container is text, and this holds bytes that are none.",
            code=Code.INVALID_REQUEST,
            hint="Pass them on stdin, or written by the shell: printf '\\377'.",
        ) from error


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SnapshotError(
            # what comes before an @ may be a password
            f"{printable(name.rpartition('@')[2])!r} is no name or id of a container.",
            code=Code.INVALID_REQUEST,
            hint="docker://container/root",
        )
    return name


def _without(error: ProviderError | SnapshotError, environment: Mapping[str, str]) -> ProviderError | SnapshotError:
    """The error, without a value of the environment in its words."""
    if any(value and value in error.message for value in environment.values()):
        error.message = "The Docker engine refused to make the container."
        error.args = (error.message,)
    return error
