"""The service `filesystem.Filesystem` and the route `/files` of a sandbox of the E2B test server.

E2B's agent reads and writes as root; the user of a request decides where relative paths start and whom new files belong to.
"""

import os
import shutil
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

from .e2b_server_chroot import USERS, Chroot, SandboxUser
from .e2b_server_processes import Message, RpcError

__all__ = ["Files", "absolute"]

_TICK: Final = 0.05
_NAMES: Final = {user.uid: user.name for user in USERS.values()}
_TYPES: Final = {stat.S_IFREG: "FILE_TYPE_FILE", stat.S_IFDIR: "FILE_TYPE_DIRECTORY"}

Seen = dict[str, tuple[int, int, int, int]]


def absolute(path: str, user: SandboxUser) -> str:
    """A path of a request as an absolute one."""
    if path == "~" or path.startswith("~/"):
        path = user.home + path[1:]
    return os.path.normpath(os.path.join(user.home, path))


class Files:
    """The files of one sandbox, as clients see them."""

    def __init__(self, chroot: Chroot) -> None:
        self._chroot = chroot
        self._watchers: dict[str, tuple[_Watch, SandboxUser]] = {}
        self._guard = threading.Lock()

    def call(self, name: str, request: Message, user: SandboxUser) -> Message:
        """A unary procedure."""
        calls = {
            "Stat": self._stat,
            "ListDir": self._list_dir,
            "MakeDir": self._make_dir,
            "Move": self._move,
            "Remove": self._remove,
            "CreateWatcher": self._create_watcher,
            "GetWatcherEvents": self._get_watcher_events,
            "RemoveWatcher": self._remove_watcher,
        }
        if name not in calls:
            raise RpcError("unimplemented", name)
        try:
            return calls[name](request, user)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RpcError("not_found", f"path not found: {error.strerror}") from error
        except OSError as error:
            raise RpcError("internal", f"{error.strerror}") from error

    def watch(self, request: Message, user: SandboxUser) -> Iterator[Message | None]:
        """Events of a folder, None each time there is none for a while."""
        watch = self._open_watch(request, user)
        return self._watch_events(watch)

    def open(self, path: str, user: SandboxUser) -> Any:
        """A file to be sent. Raises `RpcError` with `not_found` or `invalid_argument`."""
        outside = self._chroot.outside(absolute(path, user))
        try:
            if not stat.S_ISREG(os.stat(outside).st_mode):
                raise RpcError("invalid_argument", f"path '{path}' is not a regular file")
            return open(outside, "rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RpcError("not_found", f"path '{path}' does not exist") from error

    def store(self, path: str, user: SandboxUser, pieces: Iterable[bytes]) -> Message:
        """Create or overwrite a file from what comes in; what came before a connection broke stays."""
        place = absolute(path, user)
        outside = self._chroot.outside(place)
        if os.path.isdir(outside):
            raise RpcError("invalid_argument", f"path is a directory: {path}")
        try:
            self._chroot.make_folders(os.path.dirname(place), user.uid)
            with open(outside, "wb") as out:
                os.chown(outside, user.uid, user.uid)
                out.writelines(pieces)
        except OSError as error:
            code = "resource_exhausted" if error.errno == 28 else "internal"
            raise RpcError(code, f"{error.strerror}") from error
        return {"path": place, "name": os.path.basename(place), "type": "file"}

    # ---- procedures

    def _stat(self, request: Message, user: SandboxUser) -> Message:
        return {"entry": self._entry(absolute(request.get("path", ""), user))}

    def _list_dir(self, request: Message, user: SandboxUser) -> Message:
        path = absolute(request.get("path", ""), user)
        outside = self._chroot.outside(path)
        if not os.path.isdir(outside):
            if os.path.lexists(outside):
                raise RpcError("invalid_argument", f"path is not a directory: {path}")
            raise FileNotFoundError(2, "no such directory", path)
        return {"entries": [self._entry(found) for found in self._walk(path, int(request.get("depth", 1)) or 1)]}

    def _walk(self, path: str, depth: int) -> Iterator[str]:
        for name in sorted(os.listdir(self._chroot.outside(path))):
            found = os.path.join(path, name)
            yield found
            outside = self._chroot.outside(found, follow=False)
            if depth > 1 and os.path.isdir(outside) and not os.path.islink(outside):
                yield from self._walk(found, depth - 1)

    def _make_dir(self, request: Message, user: SandboxUser) -> Message:
        path = absolute(request.get("path", ""), user)
        outside = self._chroot.outside(path)
        if os.path.isdir(outside):
            raise RpcError("already_exists", f"directory already exists: {path}")
        if os.path.lexists(outside):
            raise RpcError("invalid_argument", f"path already exists but it is not a directory: {path}")
        self._chroot.make_folders(path, user.uid)
        return {"entry": self._entry(path)}

    def _move(self, request: Message, user: SandboxUser) -> Message:
        source = absolute(request.get("source", ""), user)
        destination = absolute(request.get("destination", ""), user)
        self._chroot.make_folders(os.path.dirname(destination), user.uid)
        os.rename(self._chroot.outside(source, follow=False), self._chroot.outside(destination, follow=False))
        return {"entry": self._entry(destination)}

    def _remove(self, request: Message, user: SandboxUser) -> Message:
        outside = self._chroot.outside(absolute(request.get("path", ""), user), follow=False)
        if os.path.isdir(outside) and not os.path.islink(outside):
            shutil.rmtree(outside)
        elif os.path.lexists(outside):
            os.unlink(outside)
        return {}

    def _entry(self, path: str) -> Message:
        found = os.lstat(self._chroot.outside(path, follow=False))
        link = stat.S_ISLNK(found.st_mode)
        seen = found
        if link and os.path.exists(self._chroot.outside(path)):
            seen = os.stat(self._chroot.outside(path))
        entry: Message = {
            "name": os.path.basename(path),
            "type": _TYPES.get(stat.S_IFMT(seen.st_mode), "FILE_TYPE_UNSPECIFIED"),
            "path": path,
            "size": str(found.st_size),
            "mode": stat.S_IMODE(found.st_mode),
            "permissions": stat.filemode(found.st_mode),
            "owner": _NAMES.get(found.st_uid, str(found.st_uid)),
            "group": _NAMES.get(found.st_gid, str(found.st_gid)),
            "modifiedTime": datetime.fromtimestamp(found.st_mtime, UTC).isoformat().replace("+00:00", "Z"),
        }
        return entry | (
            {"isSymlink": True, "symlinkTarget": os.readlink(self._chroot.outside(path, follow=False))} if link else {}
        )

    # ---- watching

    def _open_watch(self, request: Message, user: SandboxUser) -> "_Watch":
        path = absolute(request.get("path", ""), user)
        outside = self._chroot.outside(path)
        if not os.path.isdir(outside):
            raise RpcError("not_found", f"path {path} not found")
        return _Watch(outside, bool(request.get("recursive")))

    @staticmethod
    def _watch_events(watch: "_Watch") -> Iterator[Message | None]:
        yield {"start": {}}
        while True:
            events = watch.events()
            yield from ({"filesystem": event} for event in events)
            if not events:
                time.sleep(_TICK)
                yield None

    def _create_watcher(self, request: Message, user: SandboxUser) -> Message:
        watch = self._open_watch(request, user)
        with self._guard:
            name = f"w{len(self._watchers)}"
            self._watchers[name] = (watch, user)
        return {"watcherId": name}

    def _get_watcher_events(self, request: Message, user: SandboxUser) -> Message:
        found = self._watchers.get(request.get("watcherId", ""))
        if found is None:
            raise RpcError("not_found", f"watcher with id {request.get('watcherId')} not found")
        return {"events": found[0].events()}

    def _remove_watcher(self, request: Message, user: SandboxUser) -> Message:
        if self._watchers.pop(request.get("watcherId", ""), None) is None:
            raise RpcError("not_found", f"watcher with id {request.get('watcherId')} not found")
        return {}


class _Watch:
    """What changed in a folder since it was looked at last."""

    def __init__(self, folder: str, recursive: bool) -> None:
        self._folder = folder
        self._recursive = recursive
        self._seen = self._look()

    def events(self) -> list[Message]:
        before, now = self._seen, self._look()
        self._seen = now
        events = [{"name": name, "type": "EVENT_TYPE_REMOVE"} for name in sorted(before.keys() - now.keys())]
        for name in sorted(now):
            kinds = _changes(before.get(name), now[name])
            events += [{"name": name, "type": f"EVENT_TYPE_{kind}"} for kind in kinds]
        return events

    def _look(self) -> Seen:
        seen: Seen = {}
        for folder, folders, names in os.walk(self._folder):
            for name in folders + names:
                path = os.path.join(folder, name)
                try:
                    found = os.lstat(path)
                except FileNotFoundError:
                    continue  # it went while the folder was listed
                written = 0 if stat.S_ISDIR(found.st_mode) else found.st_mtime_ns
                seen[os.path.relpath(path, self._folder)] = (
                    found.st_ino,
                    found.st_size if written else 0,
                    written,
                    found.st_mode,
                )
            if not self._recursive:
                break
        return seen


def _changes(before: tuple[int, int, int, int] | None, now: tuple[int, int, int, int]) -> list[str]:
    if before is None or before[0] != now[0]:
        return ["CREATE", "WRITE"] if now[1] else ["CREATE"]
    return (["WRITE"] if before[1:3] != now[1:3] else []) + (["CHMOD"] if before[3] != now[3] else [])
