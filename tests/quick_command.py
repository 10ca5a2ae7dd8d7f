"""The `snapcore` command for tests that start it dozens of times and are about what it does, not about how it starts.

A process that has loaded the command's modules already forks a child for each command. A small program called `snapcore` hands it
arguments, variables, folder, umask, ignored signals and open files, passes signals on, and ends as the child ended. What only a
process of its own can have (closed streams, a terminal, other variables that Python reads when it starts) is left to the
real command, which the program becomes then.

    with quick_command(folder) as place: ...    a folder for PATH, with such a `snapcore` in it
    python quick_command.py SOCKET              the process that forks; it ends when its standard input does
"""

import fcntl
import gc
import importlib
import marshal
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

FILES: Final = 200  # open files with a number below this are handed over
READ: Final = (b"PYTHON", b"LC_", b"LANG")  # how variables begin that Python reads when it starts
SIGNALS: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# It loads nothing that is not built into Python or next to it: it is at work after 15 ms.
CLIENT: Final = """#!{python} -ISE
import _signal, _socket, marshal, posix, sys

def real():
    posix.execv({real!r}, [{real!r}, *sys.argv[1:]])

def inherited(number):
    try:
        return posix.get_inheritable(number)
    except OSError:
        return False

files = sorted(filter(inherited, map(int, posix.listdir("/proc/self/fd"))))
variables = posix.environ
read = {{n: v for n, v in variables.items() if n.startswith({read!r}) and n != b"PYTHONDONTWRITEBYTECODE"}}
if read != {values!r} or files[:3] != [0, 1, 2] or files[-1] >= {files} or any(map(posix.isatty, files[:3])):
    real()
umask = posix.umask(0o77)
posix.umask(umask)
ignored = [n for n in {signals!r} if _signal.getsignal(n) == _signal.SIG_IGN]
child, early = [], []

def told():
    answer = server.recv(4, _socket.MSG_WAITALL)
    if len(answer) < 4:
        posix._exit(255)
    return int.from_bytes(answer, "big", signed=True)

def pass_on(number, frame):
    posix.kill(child[0], number) if child else early.append(number)

for number in {signals!r}:
    if number not in ignored:
        _signal.signal(number, pass_on)
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect({socket!r})
request = marshal.dumps((sys.argv, variables, posix.getcwdb(), umask, ignored, files))
numbers = b"".join(n.to_bytes(4, sys.byteorder) for n in files)
server.sendmsg([len(request).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
server.sendall(request)
for number in files[3:]:
    posix.close(number)  # the child's alone, as are its pipes' ends
child.append(told())
for number in early:
    pass_on(number, None)
code = told()
if code < 0:
    if code != -_signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    posix.kill(posix.getpid(), -code)
posix._exit(code)
"""


@contextmanager
def quick_command(folder: Path) -> Iterator[Path]:
    """Make `folder`, to put first on PATH; where no file tells a process's end, its `snapcore` is the real one."""
    folder.mkdir(parents=True)
    real = str(Path(sys.executable).parent / "snapcore")
    if not hasattr(os, "pidfd_open"):
        (folder / "snapcore").symlink_to(real)
        yield folder
        return
    address = str(folder / "s")
    facts = {
        "python": sys.executable,
        "real": real,
        "socket": address,
        "files": FILES,
        "signals": tuple(map(int, SIGNALS)),
        "read": READ,
        "values": {
            name: value for name, value in os.environb.items() if name.startswith(READ) and name != b"PYTHONDONTWRITEBYTECODE"
        },
    }
    (folder / "snapcore").write_text(CLIENT.format(**facts))
    (folder / "snapcore").chmod(0o755)
    server = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield folder


# ---- the process that forks


def load() -> None:
    """Load what commands load, and nothing that looks at variables when it is loaded."""

    import snapcore.cli
    import snapcore.providers
    import snapcore.stores

    for name in snapcore.__all__:
        getattr(snapcore, name)
    for package in (snapcore, snapcore.cli, snapcore.providers, snapcore.stores):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name not in ("snapcore.testing", "snapcore.cli.__main__", "snapcore.integrations"):
                importlib.import_module(module.name)


def serve(address: str) -> None:
    """Fork a child for each command; returns in the child, ready to run it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(100)
    print("ready", flush=True)
    running: dict[int, tuple[int, socket.socket]] = {}  # by the file that tells the child's end
    events = select.poll()
    for file in (0, listener.fileno()):
        events.register(file, select.POLLIN)
    while True:
        clients = {client.fileno(): child for child, client in running.values()}
        for number, _ in events.poll():
            if number == 0:
                os._exit(0)
            elif number in running:
                child, client = running.pop(number)
                del clients[client.fileno()]
                events.unregister(number)
                events.unregister(client)
                os.close(number)
                _tell(client, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                client.close()
            elif number in clients:  # it was killed, and so is what it stands for
                os.kill(clients[number], signal.SIGKILL)
            elif number == listener.fileno():
                client = listener.accept()[0]
                if (child := os.fork()) == 0:
                    for other in (listener, *(client for _, client in running.values())):
                        other.detach()  # `become` closes every file
                    become(client)
                    return
                _tell(client, child)
                running[ended := os.pidfd_open(child)] = child, client
                events.register(ended, select.POLLIN)
                events.register(client, 0)  # what it sends is for the child; that it is gone is told in any case


def _tell(client: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):
        client.sendall(number.to_bytes(4, "big", signed=True))


def _beyond(file: int) -> int:
    """The same file at a number that none has that is handed over."""
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FILES)
    os.close(file)
    return moved


def become(client: socket.socket) -> None:
    """Take on what a client hands over."""
    head, files, _, _ = socket.recv_fds(client, 4, FILES)
    size = int.from_bytes(head, "big")
    request = b""
    while len(request) < size:
        request += client.recv(size - len(request))
    argv, variables, folder, umask, ignored, numbers = marshal.loads(request)
    moved = [_beyond(file) for file in files]
    streams = [(stream.encoding, stream.errors) for stream in (sys.stdin, sys.stdout, sys.stderr)]
    client.detach()
    os.closerange(0, FILES)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    for number in SIGNALS:
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
    os.environb.clear()
    os.environb.update(variables)
    time.tzset()
    os.chdir(folder)
    os.umask(umask)
    sys.argv = argv
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, line, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115  # while the process lives
        for number, (mode, line, (encoding, errors)) in enumerate(zip("rww", (-1, -1, 1), streams, strict=True))
    )
    gc.enable()


if __name__ == "__main__":
    load()
    gc.collect()
    gc.freeze()
    serve(sys.argv[1])
    from snapcore.cli.main import run

    run()
