"""A private Docker engine for the tests: one for all workers of a test run, started by the first test that needs it.

    docker_engine()                how to reach it, or why there is none
    python docker_engine.py ...    the process that runs it until the test run has ended, however that ends
    python docker_engine.py        make what takes longest, before tests wait for it

Images come from this machine: `busybox` from Debian's static binary, `toolless` with that binary under a name that can only
sleep, `gnu` by debootstrap from the mirror that apt uses.
"""

import contextlib
import ctypes
import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

GIVEN = "SNAPCORE_TEST_DOCKER"  # "1": use the engine of DOCKER_HOST, or the default socket, instead of a private one
BUSYBOX = Path("/bin/busybox")
CACHE = Path(__file__).parent.parent / ".cache"
LABEL = "snapcore.tests"
_MADE = {"busybox": "snapcore-tests/busybox:1", "toolless": "snapcore-tests/toolless:1", "gnu": "snapcore-tests/gnu:1"}
_USERS = "root:x:0:0:root:/root:/bin/sh\ndev:x:1000:1000:dev:/home/dev:/bin/sh\n"

_kept: list[subprocess.Popen[bytes]] = []


class NoEngineError(Exception):
    """There is no engine, and none can be started."""


class Engine(NamedTuple):
    """Where an engine listens: `host` as in DOCKER_HOST; `tls_host` with the client's certificates in `certificates`."""

    host: str
    tls_host: str = ""
    certificates: str = ""

    def client(self) -> Any:
        """A low-level client of the package `docker`."""
        import docker

        return docker.APIClient(self.host, version="auto", timeout=120)


def docker_engine() -> Engine:
    """The engine of this test run; raises `NoEngineError`."""
    if os.environ.get(GIVEN):
        return Engine(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
    folder = _folder()
    with _locked(folder):
        return start(folder, os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())


def start(folder: Path, until_gone: int) -> Engine:
    """The engine kept in a folder, started when it is not running; it ends with the process `until_gone`."""
    if not (folder / "ready").exists():
        missing = [tool for tool in ("dockerd", "containerd", "runc") if shutil.which(tool) is None]
        if missing or os.geteuid() != 0 or not BUSYBOX.exists():
            raise NoEngineError(
                f"No Docker engine: {', '.join(missing) or 'root, or busybox-static,'} is missing"
                f" (Debian: apt-get install docker.io busybox-static debootstrap), and {GIVEN} is not set."
            )
        with (folder / "log").open("w") as log:
            keeper = subprocess.Popen(
                [sys.executable, __file__, str(folder), str(until_gone)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _kept.append(keeper)
        deadline = time.monotonic() + 120
        while not (folder / "ready").exists():
            if keeper.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dockerd did not start:\n{(folder / 'log').read_text()[-4000:]}")
            time.sleep(0.02)
    host, tls_host, certificates = (folder / "ready").read_text().splitlines()
    return Engine(host, tls_host, certificates)


def stop(folder: Path) -> None:
    """Stop the engine kept in a folder, with all its containers."""
    if not (folder / "pid").exists():
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
    deadline = time.monotonic() + 120
    while (folder / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def end() -> None:
    """The test run ends, and the engine with it."""
    from . import services

    if services.RUN in os.environ:
        stop(Path(os.environ[services.RUN]) / "docker")
    for keeper in _kept:
        keeper.wait()


def image(engine: Engine, name: str) -> str:
    """The reference of one of the tests' images, made when the engine does not have it."""
    tag = _MADE[name]
    client = engine.client()
    with _locked(_folder()):
        if client.images(name=tag):
            return tag
        trees = {"busybox": _busybox_tree, "toolless": _toolless_tree, "gnu": _gnu_tree}
        repository, _, version = tag.partition(":")
        with trees[name]() as tree:
            sleeper = '"/busybox-sleeper", ' if name == "toolless" else ""
            changes = [f'CMD [{sleeper}"sleep", "1000000"]']
            client.import_image_from_file(str(tree), repository=repository, tag=version, changes=changes)
    client.close()
    return tag


# ---------------------------------------------------------------------------------------------------------- images


@contextlib.contextmanager
def _tar(members: dict[str, bytes | str | None], modes: dict[str, int]) -> Iterator[Path]:
    """A tar file: bytes are files, texts are links, None are folders."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as out:
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, what in members.items():
                info = tarfile.TarInfo(name)
                info.mode = modes.get(name, 0o755)
                if isinstance(what, bytes):
                    info.size = len(what)
                elif isinstance(what, str):
                    info.type, info.linkname = tarfile.SYMTYPE, what
                else:
                    info.type = tarfile.DIRTYPE
                tar.addfile(info, io.BytesIO(what) if isinstance(what, bytes) else None)
        out.flush()
        yield Path(out.name)


def _busybox_tree() -> contextlib.AbstractContextManager[Path]:
    names = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split()
    members: dict[str, bytes | str | None] = dict.fromkeys(["bin", "etc", "tmp", "root", "home", "proc", "dev", "sys"])
    members["bin/busybox"] = BUSYBOX.read_bytes()
    members |= {f"bin/{name}": "busybox" for name in names if name != "busybox"}
    members["etc/passwd"] = _USERS.encode()
    members["etc/group"] = b"root:x:0:\ndev:x:1000:\n"
    return _tar(members, {"tmp": 0o1777, "etc/passwd": 0o644, "etc/group": 0o644})


def _toolless_tree() -> contextlib.AbstractContextManager[Path]:
    # under a name that begins like this it runs the applet that it is told; nothing here is called sh, tar or find
    return _tar({"busybox-sleeper": BUSYBOX.read_bytes()}, {})


@contextlib.contextmanager
def _gnu_tree() -> Iterator[Path]:
    """Debian's least system, with the Docker engine's own version of it kept for the next run."""
    kept = CACHE / "debian-minbase.tar"
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix="snapcore-debootstrap-") as work:
            root = Path(work) / "root"
            _debootstrap(root)
            CACHE.mkdir(exist_ok=True)
            draft = kept.with_suffix(f".{os.getpid()}.draft")
            subprocess.run(
                ["tar", "-C", root, "--numeric-owner", "--exclude=./var/cache", "--exclude=./dev/*", "-cf", draft, "."],
                check=True,
            )
            draft.rename(kept)
    yield kept


def _debootstrap(root: Path) -> None:
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    command = ["debootstrap", "--variant=minbase", release["VERSION_CODENAME"].strip('"'), str(root), _mirror()]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise NoEngineError(f"debootstrap failed:\n{done.stdout[-2000:]}")
    shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
    for name, line in (("passwd", "dev:x:1000:1000:dev:/home/dev:/bin/sh\n"), ("group", "dev:x:1000:\n")):
        with (root / "etc" / name).open("a") as file:
            file.write(line)


def _mirror() -> str:
    """The first mirror of Debian's main archive that apt is set up with."""
    sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    words = [word for path in sources if path.is_file() for word in path.read_text(errors="replace").split()]
    return next((word for word in words if word.startswith(("http:", "https:")) and "/debian" in word and "security" not in word
                 and "snapshot" not in word), "http://deb.debian.org/debian")  # fmt: skip


def _folder() -> Path:
    from . import services

    folder = Path(os.environ[services.RUN]) / "docker"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ------------------------------------------------------------------------------------------- the process that keeps it


class Keeper:
    """Runs an engine in folders of its own for as long as another process lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._work = Path(tempfile.mkdtemp(prefix="snapcore-docker-"))
        self._host = f"unix://{self._work}/socket"

    def run(self, until_gone: int) -> None:
        stopped: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: stopped.append(number))
        server: subprocess.Popen[bytes] | None = None
        (self._folder / "pid").write_text(str(os.getpid()))
        try:
            port = _free_port()
            _certify(self._work)
            for driver in ("overlay2", "vfs"):
                server = self._start(driver, port)
                if self._answers(server):
                    break
            else:
                raise RuntimeError("dockerd ended")
            draft = self._folder / "ready.draft"
            draft.write_text(f"{self._host}\ntcp://127.0.0.1:{port}\n{self._work}/client\n")
            draft.rename(self._folder / "ready")
            while not stopped and _lives(until_gone) and server.poll() is None:
                time.sleep(0.1)
        finally:
            if server is not None:
                self._remove_containers(server)
                server.terminate()
                server.wait()
            self._clean()
            (self._folder / "pid").unlink(missing_ok=True)

    def _start(self, driver: str, port: int) -> "subprocess.Popen[bytes]":
        work = self._work
        libc = ctypes.CDLL(None)
        command = [
            *("dockerd", "--data-root", f"{work}/data", "--exec-root", f"{work}/exec", "--pidfile", f"{work}/pid"),
            *("--host", self._host, "--host", f"tcp://127.0.0.1:{port}", "--config-file", f"{work}/none.json"),
            *("--tlsverify", "--tlscacert", f"{work}/client/ca.pem"),
            *("--tlscert", f"{work}/server.pem", "--tlskey", f"{work}/server-key.pem"),
            *("--storage-driver", driver, "--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false"),
        ]
        (work / "none.json").write_text("{}")
        # it ends with this process, also when that is killed
        return subprocess.Popen(command, preexec_fn=lambda: libc.prctl(1, signal.SIGTERM))

    def _answers(self, server: "subprocess.Popen[bytes]") -> bool:
        import docker
        from docker.errors import DockerException

        deadline = time.monotonic() + 60
        while server.poll() is None and time.monotonic() < deadline:
            try:
                docker.APIClient(self._host, version="auto").close()
                return True
            except DockerException:
                time.sleep(0.05)
        return False

    def _remove_containers(self, server: "subprocess.Popen[bytes]") -> None:
        import docker
        from docker.errors import APIError

        if server.poll() is not None:
            return
        client = docker.APIClient(self._host, version="auto", timeout=30)
        for container in client.containers(all=True):
            with contextlib.suppress(APIError):
                client.remove_container(container["Id"], force=True, v=True)
        client.close()

    def _clean(self) -> None:
        mounted = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for path in sorted((path for path in mounted if path.startswith(f"{self._work}/")), reverse=True):
            subprocess.run(["umount", "-l", path], check=False)
        shutil.rmtree(self._work, ignore_errors=True)


def _certify(work: Path) -> None:
    """A certificate authority of the run's own, a certificate for 127.0.0.1 and one for its clients."""
    client = work / "client"
    client.mkdir(mode=0o700)
    new = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    signed = ["-CA", str(client / "ca.pem"), "-CAkey", str(work / "ca-key.pem"), "-addext", "basicConstraints=CA:FALSE"]
    for arguments in (
        ["-subj", "/CN=tests", "-keyout", str(work / "ca-key.pem"), "-out", str(client / "ca.pem")],
        [*signed, "-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(work / "server-key.pem"),
         "-out", str(work / "server.pem")],
        [*signed, "-subj", "/CN=client", "-addext", "extendedKeyUsage=clientAuth", "-keyout", str(client / "key.pem"),
         "-out", str(client / "cert.pem")],
    ):  # fmt: skip
        subprocess.run([*new, *arguments], check=True, capture_output=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Keeper(Path(sys.argv[1])).run(int(sys.argv[2]))
    elif os.geteuid() == 0 and shutil.which("dockerd") and shutil.which("debootstrap"):
        with contextlib.suppress(NoEngineError), _gnu_tree():  # tests will say so
            pass
