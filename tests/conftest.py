"""For all tests: the suites that snapcore ships explain their failures as the tests here do, and a Postgres of the run's own."""

import os
import secrets
from collections.abc import Iterator

import pytest

from . import services

pytest.register_assert_rewrite("snapcore.testing")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        services.begin()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        services.end()


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
