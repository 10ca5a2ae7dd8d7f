"""For all tests: the suites that snapcore ships explain their failures as the tests here do, and a Postgres of the run's own."""

import gc
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import docker_engine, services
from .quick_command import quick_command
from .ssh_server import SshServer, find_sshd

pytest.register_assert_rewrite("snapcore.testing")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell has begun this in the background; tests interrupt themselves
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        services.begin()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        docker_engine.end()
        services.end()


def pytest_collection_finish() -> None:
    """What has been loaded stays until the end: no test that collects its garbage, or forks, has to go through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgres_server() -> str:
    """The address of a database whose server the tests may use as they like, as long as they leave others' alone."""
    try:
        return services.postgres_server()
    except services.NoServiceError as error:
        if os.environ.get(services.REQUIRED):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The address of an empty place for one repository: a schema that does not exist yet, and is dropped in the end."""
    import psycopg
    from sqlalchemy import make_url

    name = f"test_{secrets.token_hex(8)}"
    url = make_url(postgres_server).update_query_dict({"schema": name})
    yield url.render_as_string(hide_password=False)
    with psycopg.connect(postgres_server.replace("+psycopg", "", 1), autocommit=True) as connection:
        connection.execute(f"SET client_min_messages = error; DROP SCHEMA IF EXISTS {name} CASCADE".encode())


@pytest.fixture(scope="session")
def quick_snapcore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to put first on PATH: its `snapcore` does what the installed one does, and starts in a fifth of the time."""
    with quick_command(tmp_path_factory.mktemp("quick") / "bin") as folder:
        yield folder


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """A real sshd, for this worker alone."""
    sshd = find_sshd()
    if sshd is None:
        reason = "sshd is not installed (Debian: apt-get install openssh-server)"
        if os.environ.get(services.REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)
    server = SshServer(tmp_path_factory.mktemp("ssh"), sshd)
    yield server
    server.stop()


@pytest.fixture
def ssh_on_path(ssh_server: SshServer, monkeypatch: pytest.MonkeyPatch) -> SshServer:
    """`ssh` knows the server, as if the user had configured it."""
    monkeypatch.setenv("PATH", f"{ssh_server.program}:{os.environ['PATH']}")
    return ssh_server


@pytest.fixture
def shared_ssh_on_path(ssh_server: SshServer, monkeypatch: pytest.MonkeyPatch) -> SshServer:
    """The same, with one connection for all calls: what does not depend on connections is over sooner."""
    monkeypatch.setenv("PATH", f"{ssh_server.shared_program}:{os.environ['PATH']}")
    return ssh_server
