"""Which process holds something, and whether that process is surely gone.

A holder is compared on the host where it ran. Containers share a kernel, and often a host name, but not their process
numbers: so the identity of the boot includes the namespace in which the pid counts, and a holder of another namespace is
never judged.
"""

import functools
import os
import socket
import subprocess
import sys
import time
from typing import Final

from .model import Holder

__all__ = ["current_holder", "is_gone"]

_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"  # fixed in the Linux kernel: the host's own, outside any container
_SEPARATOR: Final = "/"


def current_holder() -> Holder:
    """This process, by host name, pid, boot and start time."""
    return _holder(os.getpid())  # the pid is part of the key: a forked child is another process


def is_gone(holder: Holder) -> bool:
    """Whether that process surely does not run any more.

    True only for a process of this host and boot whose pid is free, is a zombie, or belongs to a process that started at
    another time; and for a process of an earlier boot of this host, unless either of them ran in a container. False
    whenever that cannot be told: another host, another container, an unknown start time.
    """
    here = current_holder()
    if holder.pid <= 0 or not holder.boot_id or holder.host != here.host:
        return False
    if holder.boot_id != here.boot_id:
        return _of_earlier_boot(holder.boot_id, here.boot_id)
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it runs, as another user
    started = _started(holder.pid)
    if started is None or not holder.started:
        return False
    return started != holder.started


@functools.lru_cache(maxsize=1)
def _holder(pid: int) -> Holder:
    parts = (_machine(), _boot(), _pid_namespace())
    return Holder(host=socket.gethostname(), pid=pid, boot_id=_SEPARATOR.join(parts), started=_started(pid) or 0)


def _of_earlier_boot(theirs: str, ours: str) -> bool:
    machine, boot, namespace = ours.split(_SEPARATOR)
    parts = theirs.split(_SEPARATOR)
    if len(parts) != 3 or not machine or not boot or not parts[1]:
        return False
    known_host = namespace == _FIRST_PID_NAMESPACE or sys.platform == "darwin"
    return known_host and parts[0] == machine and parts[2] == namespace and parts[1] != boot


def _machine() -> str:
    if sys.platform == "darwin":
        return "darwin"  # the host name, compared beside this, has to do
    return _read("/etc/machine-id")


def _boot() -> str:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "kern.bootsessionuuid")
    return _read("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When a process started: in clock ticks since boot on Linux, in seconds since the epoch on macOS.

    -1 for a process that has ended and was not waited for; None when it cannot be told.
    """
    if sys.platform == "darwin":
        text = _output("ps", "-o", "stat=,lstart=", "-p", str(pid))
        state, _, started = text.partition(" ")
        if not started:
            return None
        return -1 if state.startswith("Z") else int(time.mktime(time.strptime(started.strip(), "%a %b %d %H:%M:%S %Y")))
    # After the name, which is in parentheses and may hold anything, the first field is the state, the 20th the start.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return -1 if fields[0] in "ZX" else int(fields[19])


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
