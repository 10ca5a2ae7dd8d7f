"""A private Postgres for the tests: one for all workers of a test run, started by the first test that needs it.

    postgres_server()        its address, or why there is none
    python services.py ...   the process that runs it until the test run has ended, however that ends

The run's first process (with xdist the one that starts the workers) calls `begin` and `end`.
"""

import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

GIVEN = "SNAPCORE_TEST_POSTGRES"  # the address of a database that the tests may make schemas and databases in
REQUIRED = "SNAPCORE_REQUIRE_SERVICES"  # a service that is missing is a failure, not a reason to skip
RUN = "SNAPCORE_TEST_RUN"  # folder of this test run; inherited by the workers

# the tests' own user needs no password, those that they make do
HBA = """
local all all               trust
host  all snapcore all      trust
host  all all      all      scram-sha-256
"""

_kept: list[subprocess.Popen[bytes]] = []


class NoServiceError(Exception):
    """There is no server, and none can be started."""


def begin() -> None:
    """The test run begins."""
    os.environ[RUN] = os.path.join(tempfile.gettempdir(), f"snapcore-services-{secrets.token_hex(8)}")


def end() -> None:
    """The test run ends, and what it started with it."""
    folder = Path(os.environ.pop(RUN))
    if (pid := _read(folder / "pid")) is not None:
        os.kill(int(pid), signal.SIGTERM)
        _wait(lambda: not (folder / "pid").exists(), "the server to stop")
    for keeper in _kept:
        keeper.wait()
    shutil.rmtree(folder, ignore_errors=True)


def postgres_server() -> str:
    """The address of a database to make others beside; raises `NoServiceError`."""
    if given := os.environ.get(GIVEN):
        return given
    folder = Path(os.environ[RUN])
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (url := _read(folder / "url")) is None:
            binaries = _binaries()
            if binaries is None:
                raise NoServiceError(f"Postgres is not installed (Debian: apt-get install postgresql), and {GIVEN} is not set.")
            log = (folder / "log").open("w")
            with log:
                _kept.append(
                    keeper := subprocess.Popen(
                        [
                            sys.executable,
                            __file__,
                            str(folder),
                            str(binaries),
                            str(os.getppid() if _is_worker() else os.getpid()),
                        ],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            _wait(lambda: (folder / "url").exists() or keeper.poll() is not None, "the server to start")
            url = _read(folder / "url")
            if url is None:
                raise RuntimeError(f"Postgres did not start:\n{(folder / 'log').read_text()}")
    return url


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def _binaries() -> Path | None:
    """The folder of initdb and postgres, the newest of several."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    found = str(debian[-1]) if debian else shutil.which("initdb")
    return Path(os.path.realpath(found)).parent if found else None


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _wait(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited too long for {what}")
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------- the process that keeps it


class Keeper:
    """Runs a server in a folder of its own for as long as another process lives."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self._folder = folder
        self._binaries = binaries
        self._data = Path(tempfile.mkdtemp(prefix="snapcore-postgres-"))
        # postgres refuses to run as root
        self._user: int | None = None
        self._group: int | None = None
        if os.geteuid() == 0:
            shutil.chown(self._data, "postgres" if _known("postgres") else "nobody")
            owner = self._data.stat()
            self._user, self._group = owner.st_uid, owner.st_gid

    def run(self, until_gone: int) -> None:
        stopped: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: stopped.append(number))
        server: subprocess.Popen[bytes] | None = None
        try:
            self._call("initdb", "-D", f"{self._data}/db", "-U", "snapcore", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
            (self._data / "db" / "pg_hba.conf").write_text(HBA)
            port = _free_port()
            server = self._start(port)
            _write(self._folder / "pid", str(os.getpid()))
            _write(self._folder / "url", f"postgresql+psycopg://snapcore@127.0.0.1:{port}/postgres")
            while not stopped and _lives(until_gone) and server.poll() is None:
                time.sleep(0.1)
        finally:
            if server is not None:
                server.send_signal(signal.SIGINT)  # fast: sessions are ended
                server.wait()
            shutil.rmtree(self._data, ignore_errors=True)
            (self._folder / "pid").unlink(missing_ok=True)
            if not _lives(until_gone):
                shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self._data),
            "fsync": "off",
            "max_connections": "300",
            "shared_buffers": "64MB",
            "deadlock_timeout": "200ms",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        server = subprocess.Popen(
            [self._binaries / "postgres", "-D", f"{self._data}/db", "-p", str(port), *options],
            cwd=self._data,
            user=self._user,
            group=self._group,
        )
        ready = [str(self._binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port), "-U", "snapcore", "-d", "postgres"]
        _wait(lambda: server.poll() is not None or subprocess.run(ready, check=False).returncode == 0, "the server to start")
        if server.poll() is not None:
            raise RuntimeError("postgres ended")
        return server

    def _call(self, tool: str, *arguments: str) -> None:
        subprocess.run([self._binaries / tool, *arguments], check=True, cwd=self._data, user=self._user, group=self._group)


def _known(user: str) -> bool:
    import pwd

    return any(entry.pw_name == user for entry in pwd.getpwall())


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _write(path: Path, text: str) -> None:
    """Whole, or not there."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


if __name__ == "__main__":
    Keeper(Path(sys.argv[1]), Path(sys.argv[2])).run(int(sys.argv[3]))
