"""Folders of this host as sandboxes: nothing isolates what runs there from the rest of the host."""

import contextlib
import errno
import os
import pwd
import re
import secrets
import socket
import stat
import urllib.parse
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from snapcore.databases import data_folder
from snapcore.errors import Code, ProviderError, SnapshotError, printable
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
    lacks,
    refuse_options,
    run_hooks,
)

from .direct import DirectWorkspace
from .folders import FOLDER_FLAGS, FolderCache, remove_tree
from .processes import Processes, cannot_start, keeping
from .threads import in_thread

if TYPE_CHECKING:
    from _typeshed import StrPath

__all__ = ["LocalProvider", "LocalSandbox", "connect"]

NAME: Final = "file"
ABILITIES: Final = Abilities(create=True, destroy=True, exec=True, binary_pipes=True)
PIECE: Final = 1 << 20
NOT_RUN: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENAMETOOLONG, errno.ELOOP)

_FOLDER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", re.ASCII)
_DYING: Final = ".destroyed."
_INHERITED: Final = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")


class LocalSandbox:
    """A sandbox handle for a local folder, which need not exist yet: a restore creates it.

    Commands get of this process's environment only where programs and the home folder are and how text is written, so that
    what the worker knows stays with it; `environment` is added. `user` is who commands run as, which takes the superuser.
    """

    def __init__(self, path: "StrPath", *, environment: Mapping[str, str] | None = None, user: str | None = None) -> None:
        try:
            self._root = os.path.abspath(os.fspath(path))
        except FileNotFoundError as error:
            raise SnapshotError(
                "The current folder is gone.", code=Code.MISSING_WORKSPACE, hint="Change to one that exists."
            ) from error
        if "\0" in self._root:
            raise SnapshotError("A folder's path holds no NUL.", code=Code.INVALID_WORKSPACE, hint="Name an existing folder.")
        self._id = DirectWorkspace(self._root).sandbox_id
        self._environment = dict(environment or {})
        self._user = user
        self._processes = Processes()
        self._closed = False

    @property
    def sandbox_id(self) -> str:
        """`file://` with the host's name and the resolved path."""
        return self._id

    @property
    def workspace_root(self) -> str:
        """The folder's absolute path."""
        return self._root

    @property
    def binding(self) -> Binding:
        """The folder's path; its environment is not kept."""
        return Binding(NAME, self._id, self._root)

    @property
    def abilities(self) -> Abilities:
        """Everything but to be paused and to take native snapshots."""
        return ABILITIES

    def workspace(self, root: str | None = None) -> DirectWorkspace:
        """The bulk view of `root`; a relative one is taken from the sandbox's folder."""
        return DirectWorkspace(os.path.join(self._root, root) if root else self._root)

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
        """See `SandboxHandle.exec`."""
        words = argument_list(command)
        check_environment(environment or {})
        self._check_open()
        options = _identity(user or self._user)
        settings = {**options.pop("env"), **self._environment, **(environment or {})}
        folder = os.path.join(self._root, cwd) if cwd else self._root
        kept, sink = keeping(max_output, on_output)
        try:
            code = await self._processes.run(words, stdin, sink, timeout=timeout, cwd=folder, env=settings, **options)
        except OSError as error:
            if error.errno not in NOT_RUN:
                raise cannot_start(words[0], error) from error
            self._check_open()
            # as a shell says it; Python does not tell which of the two it was
            what = f"{os.fsdecode(error.filename or words[0])}: {error.strerror}\n"
            sink("stderr", os.fsencode(what))
            return kept.result(127 if isinstance(error, FileNotFoundError) else 126)
        self._check_open()
        return kept.result(code)

    async def upload(self, path: str, data: bytes | AsyncIterator[bytes]) -> None:
        """See `SandboxHandle.upload`. The file is replaced only once all data is there."""
        target = check_path(path)
        self._check_open()
        draft = f"{os.path.dirname(target)}/.snapcore-upload.{secrets.token_hex(8)}"
        owner = _identity(self._user)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # at once: nobody is cancelled here
        try:
            if "user" in owner:
                os.fchown(fd, owner["user"], owner["group"])
            async for piece in _pieces(data):
                await in_thread(_write_all, fd, piece)
            await in_thread(os.replace, draft, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # it may have been renamed before the caller was cancelled
                os.unlink(draft)
            raise
        finally:
            os.close(fd)

    async def download(self, path: str) -> AsyncIterator[bytes]:
        """See `SandboxHandle.download`: pieces of at most 1 MiB. What is no file is never waited for."""
        target = check_path(path)
        self._check_open()
        with await in_thread(_open_file, target) as file:
            while piece := await in_thread(file.read, PIECE):
                yield piece

    def end_commands(self) -> None:
        """Kill the commands that still run here."""
        self._processes.end()

    async def close(self) -> None:
        """End the commands that still run. Idempotent."""
        self._closed = True
        self.end_commands()

    def _check_open(self) -> None:
        if self._closed:
            raise ProviderError("The sandbox handle is closed.", code=Code.SANDBOX_UNAVAILABLE, hint="Open the sandbox again.")
        if not os.path.isdir(self._root):
            raise _no_sandbox(self._root)


class LocalProvider:
    """Sandboxes that are folders below `base`, which is the provider's own: by default `snapcore/sandboxes` in this user's data
    folder. The environment that a sandbox is made with lasts as long as the handle that `create` returns;
    `SandboxSpec.workspace_root` plays no part."""

    def __init__(self, base: "StrPath | None" = None, *, on_create: Sequence[Hook] = (), on_open: Sequence[Hook] = ()) -> None:
        self._base = os.path.realpath(os.path.join(data_folder(), "snapcore", "sandboxes") if base is None else base)
        self._on_create = tuple(on_create)
        self._on_open = tuple(on_open)
        self._handles: weakref.WeakSet[LocalSandbox] = weakref.WeakSet()

    @property
    def name(self) -> str:
        """`file`."""
        return NAME

    @property
    def abilities(self) -> Abilities:
        """Everything but to pause and to take native snapshots."""
        return ABILITIES

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """A new folder, called `spec.name` or at random. `user` owns it and runs its commands: that takes the superuser."""
        refuse_options(spec, "Local", "name", "user", "environment")
        check_environment(spec.environment)
        name = secrets.token_hex(8) if spec.name is None else spec.name
        if not _FOLDER.fullmatch(name):
            raise SnapshotError(f"{printable(name)!r} is no name for a local sandbox.", code=Code.INVALID_REQUEST)
        owner = _identity(spec.user)
        handle = LocalSandbox(os.path.join(self._base, name), environment=spec.environment, user=spec.user)
        try:
            await in_thread(os.makedirs, self._base, exist_ok=True)
            await in_thread(os.mkdir, handle.workspace_root)
        except FileExistsError:
            raise SnapshotError(f"There is a sandbox {name} already.", code=Code.INVALID_REQUEST) from None
        if "user" in owner:
            os.chown(handle.workspace_root, owner["user"], owner["group"])
        self._handles.add(handle)
        await run_hooks((*self._on_create, *self._on_open), handle, lambda: self.destroy(handle.binding))
        return handle

    async def open(self, binding: Binding) -> SandboxHandle:
        """The sandbox in a folder below `base` on this host."""
        path = self._path(binding)
        if not await in_thread(os.path.isdir, path):
            raise _no_sandbox(path)
        handle = LocalSandbox(path)
        self._handles.add(handle)
        await run_hooks(self._on_open, handle, handle.close)
        return handle

    async def pause(self, handle: SandboxHandle) -> None:
        """Not possible."""
        raise lacks("Local", "be paused")

    async def snapshot(self, handle: SandboxHandle) -> str:
        """Not possible."""
        raise lacks("Local", "take native snapshots", "Capture it: repo.capture(handle, thread_id=...).")

    async def destroy(self, binding: Binding) -> None:
        """Remove the folder, and end the commands that handles of this provider run there."""
        path = self._path(binding)
        await in_thread(self._set_aside, path)  # first: a command that ends by it finds its sandbox gone
        for handle in list(self._handles):
            if handle.workspace_root == path:
                handle.end_commands()
        await in_thread(self._remove)

    def _path(self, binding: Binding) -> str:
        path = binding.workspace_root
        if os.path.dirname(path) != self._base or not _FOLDER.fullmatch(os.path.basename(path)) or binding.provider != NAME:
            raise ProviderError(
                f"{printable(path)} is no sandbox of {printable(self._base)}.",
                code=Code.NO_SANDBOX,
                hint="Open it with the provider that made it.",
            )
        if not binding.sandbox_id.startswith(f"{NAME}://{socket.gethostname()}/"):
            raise _no_sandbox(path)
        return path

    def _set_aside(self, path: str) -> None:
        """Rename the folder: whatever comes between, the sandbox is gone, and what is left goes with the next."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, os.path.join(self._base, _DYING + secrets.token_hex(8)))

    def _remove(self) -> None:
        """Remove all that was set aside."""
        if not os.path.isdir(self._base):
            return
        with _Unlocking(os.open(self._base, FOLDER_FLAGS)) as folders:
            for name in os.listdir(self._base):
                if name.startswith(_DYING):
                    remove_tree(folders, os.fsencode(name))


class _Unlocking(FolderCache):
    """Makes folders that their owner may not write writable on the way, so that they can be emptied."""

    def enter(self, parent: int, name: bytes, path: bytes) -> int:
        fd = super().enter(parent, name, path)
        found = os.fstat(fd)
        if found.st_mode & 0o700 != 0o700 and found.st_uid == os.geteuid():
            os.fchmod(fd, 0o700)
        return fd


async def connect(address: str) -> LocalSandbox:
    """The sandbox at a path (`./dir`, `/dir`, `~/dir`) or a `file:` URL (percent-escapes are decoded; a host is ignored)."""
    if address.startswith("file:"):
        parts = urllib.parse.urlsplit(address, allow_fragments=False)
        address = os.fsdecode(urllib.parse.unquote_to_bytes(parts.path))
    return LocalSandbox(os.path.expanduser(address))


def _no_sandbox(path: str) -> ProviderError:
    return ProviderError(f"There is no sandbox in {printable(path)}.", code=Code.NO_SANDBOX)


def _identity(user: str | None) -> dict[str, Any]:
    """For `subprocess.Popen`: who runs a command, and the environment that is taken over."""
    settings = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    if user is None:
        return {"env": settings}
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise SnapshotError(f"This host has no user {printable(user)}.", code=Code.INVALID_REQUEST) from None
    settings |= {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}
    if entry.pw_uid == os.geteuid():
        return {"env": settings}
    if os.geteuid() != 0:
        raise lacks("Local", f"run commands as {printable(user)}", "Only the superuser can become somebody else.")
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return {"env": settings, "user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}


async def _pieces(data: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if isinstance(data, bytes | bytearray | memoryview):
        yield bytes(data)
        return
    async for piece in data:
        yield piece


def _open_file(path: str) -> BinaryIO:
    """Open a file to be read; a FIFO would have a reader wait for a writer."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.EINVAL, "is no file", path)
    return os.fdopen(fd, "rb")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
