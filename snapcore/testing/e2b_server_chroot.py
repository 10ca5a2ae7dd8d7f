"""The inside of a sandbox of the E2B test server: a folder that processes are confined to by chroot.

Its tools are either busybox alone, or this host's own: /usr, mounted read-only where only the sandbox's processes see it.

It has the users `root` and `user` (1000), who is who they are: processes run under their ids. The server itself looks at
files from outside, as root, as E2B's own agent does; it resolves links inside the folder. That is for tests: it does not
withstand a sandbox that swaps links under its hands.
"""

import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["USERS", "Chroot", "SandboxUser", "missing"]

_PASSWD: Final = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:/home/user:/bin/bash\n"
_GROUP: Final = "root:x:0:\nuser:x:1000:\n"
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BASH: Final = '#!/bin/sh\nexec /bin/sh "$@"\n'
_ENTER: Final = 'cd "$1" || exit 126; shift; exec "$@"'
# mounts that this process and its children see, and no others
_MOUNTED: Final = """
mount -t proc proc "$1/proc" || exit 125
if [ -L "$1/bin" ]; then mount --bind /usr "$1/usr" && mount -o remount,bind,ro "$1/usr" || exit 125; fi
shift; exec "$@"
"""
_MOST_LINKS: Final = 40


class SandboxUser(NamedTuple):
    """A user of the sandbox."""

    name: str
    uid: int
    home: str


USERS: Final = {"root": SandboxUser("root", 0, "/root"), "user": SandboxUser("user", 1000, "/home/user")}


def missing() -> str:
    """Why sandboxes cannot be made here, or nothing."""
    if os.geteuid() != 0 or not os.path.isdir("/proc/self"):
        return "The E2B test server's sandboxes are chroots, which only root on Linux can make."
    if shutil.which("unshare") is None or shutil.which("chroot") is None:
        return "unshare or chroot is not installed."
    if not os.path.islink("/bin"):
        return "This host has no merged /usr, which the sandboxes take their tools from."
    if shutil.which("busybox") is None:
        return "busybox is not installed (Debian: apt-get install busybox-static)."
    return ""


class Chroot:
    """The files and processes of one sandbox. `folder` is its root, on this host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, folder: Path, *, busybox: bool) -> "Chroot":
        """A new one, with the tools of busybox or of this host."""
        for name in ("dev", "etc", "home", "proc", "root", "usr", "var"):
            (folder / name).mkdir(parents=True)
        if busybox:
            _install_busybox(folder / "bin")
        else:
            for name in ("bin", "lib", "lib64", "sbin"):
                (folder / name).symlink_to(f"usr/{name}")
        folder.chmod(0o755)
        tmp = folder / "tmp"
        tmp.mkdir()
        tmp.chmod(0o1777)
        home = folder / "home/user"
        home.mkdir()
        os.chown(home, 1000, 1000)
        (folder / "etc/passwd").write_text(_PASSWD)
        (folder / "etc/group").write_text(_GROUP)
        for name, minor in (("null", 3), ("zero", 5), ("urandom", 9)):
            os.mknod(folder / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
            (folder / "dev" / name).chmod(0o666)
        return cls(folder)

    def copy(self, folder: Path) -> "Chroot":
        """All of it once more."""
        subprocess.run(["cp", "-a", "--", self.folder, folder], check=True)
        return Chroot(folder)

    def remove(self) -> None:
        """End its processes and delete its files."""
        self.signal_all(signal.SIGKILL)
        subprocess.run(["rm", "-rf", "--", self.folder], check=True)

    # ---- files

    def outside(self, path: str, *, follow: bool = True) -> str:
        """Where a path of the sandbox lies on this host; links are followed inside, the last one if `follow` is set."""
        todo = [part for part in path.split("/") if part]
        done: list[str] = []
        links = 0
        while todo:
            part = todo.pop(0)
            if part in (".", ".."):
                done = done[:-1] if part == ".." else done
                continue
            here = os.path.join(self.folder, *done, part)
            if os.path.islink(here) and (follow or todo):
                links += 1
                if links > _MOST_LINKS:
                    raise OSError("too many links")
                target = os.readlink(here)
                done = [] if target.startswith("/") else done
                todo = [step for step in target.split("/") if step] + todo
            else:
                done.append(part)
        return os.path.join(self.folder, *done)

    def make_folders(self, path: str, uid: int) -> None:
        """The folder at a path of the sandbox and all above it, new ones belonging to `uid`."""
        parts = [part for part in path.split("/") if part]
        for count in range(1, len(parts) + 1):
            here = self.outside("/" + "/".join(parts[:count]))
            if not os.path.isdir(here):
                os.mkdir(here, 0o755)
                os.chown(here, uid, uid)

    # ---- processes

    def start(self, argv: list[str], user: SandboxUser, cwd: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """A process of the sandbox with pipes, in a session of its own."""
        return subprocess.Popen(
            [
                *("unshare", "--mount", "--", "sh", "-c", _MOUNTED, "sh", str(self.folder)),
                *("chroot", f"--userspec={user.uid}:{user.uid}", f"--groups={user.uid}", str(self.folder)),
                *("/bin/sh", "-c", _ENTER, "sh", cwd, *argv),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": _PATH, "HOME": user.home, "USER": user.name, "LOGNAME": user.name, **environment},
            start_new_session=True,
        )

    def processes(self) -> list[int]:
        """Ids of all processes inside."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    inside = os.readlink(f"/proc/{name}/root") == str(self.folder)
                except OSError:
                    continue  # it has ended
                if inside:
                    found.append(int(name))
        return found

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to each process inside, until no new one turns up."""
        sent: set[int] = set()
        while fresh := set(self.processes()) - sent:
            for pid in fresh:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            sent |= fresh


def _install_busybox(folder: Path) -> None:
    busybox = shutil.which("busybox")
    assert busybox is not None
    folder.mkdir()
    shutil.copy(busybox, folder / "busybox")
    listed = subprocess.run([busybox, "--list"], capture_output=True, check=True, text=True)
    for applet in listed.stdout.split():
        if applet != "busybox":
            (folder / applet).symlink_to("busybox")
    (folder / "bash").write_text(_BASH)
    (folder / "bash").chmod(0o755)
