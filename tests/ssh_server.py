"""A private OpenSSH server for tests: on a free port of this host, with keys of its own, for the user who runs the tests."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = ["SshServer", "find_sshd"]

SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxSessions 100
MaxStartups 100
LogLevel ERROR
"""
CLIENT = """
Host sandbox
    HostName 127.0.0.1
    Port {port}
    User {user}
Host *
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    LogLevel ERROR
"""


SHARED = """
Host *
    ControlMaster auto
    ControlPath {sockets}/%C
    ControlPersist 60
"""


def find_sshd() -> str | None:
    """The server's program, None when it is not installed."""
    return shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin:" + os.environ.get("PATH", ""))


class SshServer:
    """A running server. `config` is a configuration for clients; `program` is a folder with an `ssh` that uses it,
    `shared_program` one whose calls share a connection, as docs/cli.md advises."""

    def __init__(self, folder: Path, sshd: str) -> None:
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self.config = folder / "client_config"
        self.program = folder / "bin"
        self.shared_program = folder / "shared_bin"
        self._folder = folder
        self._sshd = sshd
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        (folder / "server_config").write_text(SERVER.format(port=self.port, folder=folder))
        self.config.write_text(CLIENT.format(port=self.port, folder=folder, user=self.user))
        host_key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}")
        self._sockets = Path(tempfile.mkdtemp(prefix="ssh-"))  # a socket's path must be short
        shared = folder / "shared_config"
        shared.write_text(self.config.read_text() + SHARED.format(sockets=self._sockets))
        _wrap(self.program, self.config)
        _wrap(self.shared_program, shared)
        self._process = self._start()

    def stop(self) -> None:
        """End the server, and the clients that keep a shared connection; other sessions that are open go on."""
        for socket_path in self._sockets.iterdir():
            subprocess.run(["ssh", "-o", f"ControlPath={socket_path}", "-O", "exit", "sandbox"], capture_output=True, check=False)
        shutil.rmtree(self._sockets)
        self._process.terminate()
        self._process.wait()

    def drop_connections(self) -> None:
        """Cut every connection, as a network that fails."""
        pid = self._process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)

    def _start(self) -> "subprocess.Popen[bytes]":
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where it locks itself in before a login
        log = self._folder / "log"
        process = subprocess.Popen([self._sshd, "-D", "-f", self._folder / "server_config", "-E", log], stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=10).close()
            except OSError:
                time.sleep(0.02)
            else:
                return process
        process.kill()
        process.wait()
        raise RuntimeError(f"sshd did not start: {log.read_text() if log.exists() else ''}")


def _wrap(folder: Path, config: Path) -> None:
    """Put an `ssh` that reads `config` into a new folder."""
    folder.mkdir()
    wrapper = folder / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    wrapper.chmod(0o755)
