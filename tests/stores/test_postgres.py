"""What only Postgres has to show: addresses, rights, errors, schemas, sessions that keep nothing."""

import asyncio
import secrets
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, make_url

from snapcore.errors import Code, RepositoryError, SnapcoreError, SnapshotError
from snapcore.protocols import StoreIdentity
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.stores.sql_dialects import open_database
from snapcore.stores.sql_migrate import upgrade
from snapcore.stores.sql_postgres_errors import explain
from snapcore.stores.sql_schema import HEAD_REVISION
from snapcore.stores.sql_transactions import Transaction
from snapcore.testing.entries import IDENTITY, acquire, append, digest, pack_of, start

from .postgres_helpers import on_statement, raw, value

PASSWORD = "hidden-Passw0rd"


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[SqlCheckpointStore]:
    store = SqlCheckpointStore(postgres_url)
    await store.initialize(IDENTITY)
    yield store
    await store.close()


@pytest.fixture
def role(postgres_url: str) -> Iterator[str]:
    """A user with a password and no rights."""
    name = f"role_{secrets.token_hex(6)}"
    with raw(postgres_url) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'".encode())
        yield name
        connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


def address(url: str, **changes: Any) -> str:
    """The address with another user, host or option."""
    options = {name: changes.pop(name) for name in list(changes) if name in ("sslmode", "options", "bogus")}
    return make_url(url).set(**changes).update_query_dict(options).render_as_string(hide_password=False)


async def refusal(url: str, call: str = "identity", *arguments: Any) -> RepositoryError:
    """What a store at that address says."""
    store = SqlCheckpointStore(url, busy_timeout=0.5)
    try:
        with pytest.raises(RepositoryError) as caught:
            await getattr(store, call)(*arguments)
    finally:
        await store.close()
    return caught.value


# ---- addresses


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "postgresql", "postgres"])
async def test_the_usual_schemes_are_understood(postgres_url: str, scheme: str) -> None:
    store = SqlCheckpointStore(address(postgres_url, drivername=scheme))
    assert await store.identity() is None
    await store.close()


def test_the_address_of_a_store_holds_no_user_no_password_and_no_options() -> None:
    store = SqlCheckpointStore(f"postgres://me:{PASSWORD}@host:5433/db?schema=mine&sslpassword={PASSWORD}")
    assert store.url == "postgresql+psycopg://host:5433/db?schema=mine"
    asyncio.run(store.close())


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{PASSWORD}@host:port/db",
        f"postgresql://me:to@{PASSWORD}@host/db",
        f"postgresql+asyncpg://me:{PASSWORD}@host/db",
        f"postgresql://me:{PASSWORD}@host/db?schema=a;b",
    ],
)
def test_addresses_that_make_no_sense_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(RepositoryError) as caught:
        SqlCheckpointStore(url)
    assert caught.value.code is Code.UNKNOWN_SCHEME
    assert PASSWORD not in str(caught.value)


async def test_a_search_path_of_the_users_own_serves_as_well(postgres_server: str, postgres_url: str) -> None:
    name = make_url(postgres_url).query["schema"]
    with raw(postgres_url) as connection:
        connection.execute(f'CREATE SCHEMA "{name}"'.encode())
        store = SqlCheckpointStore(address(postgres_server, options=f"-csearch_path={name}"))
        await store.initialize(IDENTITY)
        await store.close()
        assert value(connection, "SELECT count(*) FROM pg_tables WHERE schemaname = %s", name) > 5


def test_psycopg_is_imported_for_postgres_alone_and_named_when_it_is_missing() -> None:
    script = """
import sys
from snapcore.errors import RepositoryError
from snapcore.stores.sql import SqlCheckpointStore
SqlCheckpointStore("sqlite://")
print([name for name in sys.modules if name.startswith(("psycopg", "sqlalchemy.dialects.postgresql"))])
sys.modules["psycopg"] = None
try:
    SqlCheckpointStore("postgresql://host/db")
except RepositoryError as error:
    print(error.code, "pip install 'snapcore[postgres]'" in error.hint)
"""
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ended.stdout.splitlines() == ["[]", "MISSING_EXTRA True"]


# ---- servers that say no


async def test_a_wrong_password_is_told_and_not_shown(postgres_url: str, role: str) -> None:
    wrong = "wrong-" + PASSWORD
    error = await refusal(address(postgres_url, username=role, password=wrong))
    assert error.code is Code.ACCESS_DENIED
    assert not error.retryable
    assert PASSWORD not in "".join(traceback.format_exception(error))


async def test_a_user_without_rights_is_told(store: SqlCheckpointStore, postgres_url: str, role: str) -> None:
    with raw(postgres_url) as connection:
        connection.execute(f"GRANT USAGE ON SCHEMA {make_url(postgres_url).query['schema']} TO {role}".encode())
    url = address(postgres_url, username=role, password=PASSWORD)
    for call in ("head", "acquire_writer"):
        assert (await refusal(url, call, "thread")).code is Code.ACCESS_DENIED


async def test_a_user_who_may_only_read_reads_and_is_told_when_writing(
    store: SqlCheckpointStore, postgres_url: str, role: str
) -> None:
    first = await append(store, "thread", "first")
    schema = make_url(postgres_url).query["schema"]
    with raw(postgres_url) as connection:
        connection.execute(
            f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}".encode()
        )
    url = address(postgres_url, username=role, password=PASSWORD)
    reader = SqlCheckpointStore(url)
    assert await reader.head("thread") == first
    await reader.close()
    assert (await refusal(url, "acquire_writer", "thread")).code is Code.READ_ONLY
    assert (await refusal(url, "pin", [], ("thread", "first"))).code is Code.READ_ONLY, "which a restore takes for an answer"


async def test_too_many_connections_are_worth_another_try(postgres_url: str, role: str) -> None:
    with raw(postgres_url) as connection:
        connection.execute(f"ALTER ROLE {role} CONNECTION LIMIT 0".encode())
    error = await refusal(address(postgres_url, username=role, password=PASSWORD))
    assert (error.code, error.retryable) == (Code.STORE_UNAVAILABLE, True)
    assert "connections" in str(error)


@pytest.mark.parametrize(
    ("changes", "code", "retryable"),
    [
        ({"database": "there_is_no_such_database"}, Code.NO_REPOSITORY, False),
        ({"username": "there_is_no_such_user"}, Code.ACCESS_DENIED, False),
        ({"sslmode": "verify-full"}, Code.STORE_UNAVAILABLE, False),
        ({"host": "no-such-host.invalid"}, Code.STORE_UNAVAILABLE, True),
        ({"port": 1}, Code.STORE_UNAVAILABLE, True),
        ({"bogus": PASSWORD}, Code.INVALID_REQUEST, False),
        ({"sslmode": "bogus"}, Code.INVALID_REQUEST, False),
    ],
    ids=["database", "user", "tls", "host", "port", "option", "value"],
)
async def test_what_cannot_be_connected_to_is_told(
    postgres_server: str, changes: dict[str, Any], code: Code, retryable: bool
) -> None:
    error = await refusal(address(postgres_server, **changes))
    assert (error.code, error.retryable) == (code, retryable)
    assert "failed:" not in str(error), "in words of our own"


async def test_a_read_only_server_can_be_read_and_not_written(store: SqlCheckpointStore, postgres_url: str) -> None:
    first = await append(store, "thread", "first")
    url = address(postgres_url, options="-cdefault_transaction_read_only=on")
    reader = SqlCheckpointStore(url)
    assert await reader.head("thread") == first
    assert len(await reader.locate([first.record_id])) == 1
    await reader.close()
    assert (await refusal(url, "acquire_writer", "thread")).code is Code.READ_ONLY


STATES = [
    ("53100", Code.STORE_FULL, True),
    ("53200", Code.STORE_UNAVAILABLE, True),
    ("42501", Code.ACCESS_DENIED, False),
    ("25006", Code.READ_ONLY, False),
    ("58030", Code.STORE_UNAVAILABLE, True),
    ("57014", Code.STORE_UNAVAILABLE, True),
    ("XX001", Code.DAMAGED, False),
    ("40001", Code.STORE_UNAVAILABLE, True),
    ("P0001", Code.STORE_UNAVAILABLE, False),
]


def fail_with(url: str, state: str, times: int, table: str = "checkpoints", *, at_commit: bool = False) -> None:
    """Let the server fail the next insertions into a table with that SQLSTATE."""
    when = (
        "CREATE CONSTRAINT TRIGGER t AFTER INSERT ON {} DEFERRABLE INITIALLY DEFERRED"
        if at_commit
        else "CREATE TRIGGER t BEFORE INSERT ON {}"
    )
    with raw(url) as connection:
        connection.execute(
            f"""
            CREATE SEQUENCE failures;
            CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF nextval('failures') <= {times} THEN RAISE EXCEPTION 'as asked' USING ERRCODE = '{state}'; END IF;
                RETURN NEW;
            END $$;
            {when.format(table)} FOR EACH ROW EXECUTE FUNCTION fail()
            """.encode()
        )


@pytest.mark.parametrize(("state", "code", "retryable"), STATES, ids=[row[0] for row in STATES])
async def test_errors_of_the_server_have_codes_and_change_nothing(
    store: SqlCheckpointStore, postgres_url: str, state: str, code: Code, retryable: bool
) -> None:
    grant, checkpoint, commit = await start(store, "thread", "first")
    fail_with(postgres_url, state, 100)
    with pytest.raises(RepositoryError) as caught:
        await store.append(grant.lease, checkpoint, commit)
    assert (caught.value.code, caught.value.retryable) == (code, retryable)
    assert await store.head("thread") is None
    with raw(postgres_url) as connection:
        connection.execute("DROP TRIGGER t ON checkpoints")
    assert await store.append(grant.lease, checkpoint, commit) == checkpoint


@pytest.mark.parametrize("at_commit", [False, True], ids=["in a statement", "at commit"])
@pytest.mark.parametrize("state", ["40001", "40P01", "55P03"])
async def test_a_transaction_that_the_server_gave_up_is_run_again(
    store: SqlCheckpointStore, postgres_url: str, state: str, at_commit: bool
) -> None:
    grant, checkpoint, commit = await start(store, "thread", "first")
    fail_with(postgres_url, state, 2, at_commit=at_commit)
    assert await store.append(grant.lease, checkpoint, commit) == checkpoint
    with raw(postgres_url) as connection:
        assert value(connection, "SELECT nextval('failures')") == 4, "two failures and a success"
    assert await store.checkpoints("thread") == [checkpoint]


@pytest.mark.parametrize(
    ("text", "code"), [("a\0b", Code.INVALID_ENTRY), ("\ud800", Code.INVALID_ENTRY)], ids=["nul", "surrogate"]
)
async def test_text_that_cannot_be_stored_is_refused(store: SqlCheckpointStore, text: str, code: Code) -> None:
    for call in (store.stat_digests(text, "root"), store.stat_digests("sandbox", text)):
        with pytest.raises(SnapshotError) as caught:
            await call
        assert caught.value.code is code
    assert await append(store, "thread", "first")


# ---- schema


def schema_of(connection: Connection, schema: str) -> list[tuple[Any, ...]]:
    columns = "SELECT table_name, column_name, data_type, is_nullable, column_default IS NULL, collation_name, is_identity"
    found = connection.exec_driver_sql(
        f"{columns} FROM information_schema.columns WHERE table_schema = '{schema}' ORDER BY table_name, column_name"
    ).all()
    indexes = connection.exec_driver_sql(
        f"SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = '{schema}' ORDER BY 1, 2"
    )
    return [tuple(row) for row in (*found, *indexes)]


async def test_migrations_lead_to_the_same_schema_as_a_new_database(store: SqlCheckpointStore, postgres_url: str) -> None:
    name = str(make_url(postgres_url).query["schema"])
    database = open_database(postgres_url)
    with database.connect(writes=False) as connection, connection.begin():
        new = schema_of(connection, name)
    with raw(postgres_url) as past:
        past.execute(f"SET client_min_messages = error; DROP SCHEMA {name} CASCADE".encode())
    with database.connect(writes=True) as connection, connection.begin():
        database.prepare(connection)
        upgrade(connection)
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() == HEAD_REVISION
    with database.connect(writes=False) as connection, connection.begin():
        assert schema_of(connection, name) == new
    database.dispose()
    assert len(new) > 60


async def test_stores_that_initialise_at_once_agree(postgres_url: str) -> None:
    stores = [SqlCheckpointStore(postgres_url) for _ in range(5)]
    mine = [StoreIdentity(f"repository-{number}", "database") for number in range(5)]
    found = await asyncio.gather(*(store.initialize(identity) for store, identity in zip(stores, mine, strict=True)))
    assert len(set(found)) == 1
    assert found[0] in mine
    for store in stores:
        assert await store.identity() == found[0]
        await store.close()


async def test_tables_of_something_else_are_left_alone(postgres_url: str) -> None:
    name = make_url(postgres_url).query["schema"]
    with raw(postgres_url) as connection:
        connection.execute(f"CREATE SCHEMA {name}; CREATE TABLE {name}.checkpoints (mine text)".encode())
        error = await refusal(postgres_url, "initialize", IDENTITY)
        assert error.code is Code.WRONG_DATABASE
        assert "?schema=" in str(error)
        assert connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [name]).fetchall() == [
            ("checkpoints",)
        ]


async def test_a_database_that_is_not_utf8_is_refused(postgres_server: str) -> None:
    name = f"test_{secrets.token_hex(6)}"
    with raw(postgres_server) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0".encode())
        try:
            error = await refusal(address(postgres_server, database=name), "initialize", IDENTITY)
        finally:
            connection.execute(f"DROP DATABASE {name}".encode())
    assert error.code is Code.WRONG_DATABASE
    assert "LATIN1" in str(error)


async def test_what_was_never_initialised_is_no_repository(postgres_url: str) -> None:
    store = SqlCheckpointStore(postgres_url)
    assert await store.identity() is None
    await store.close()
    for call in ("head", "acquire_writer"):
        assert (await refusal(postgres_url, call, "thread")).code is Code.NO_REPOSITORY


# ---- transactions and sessions


async def test_reads_see_one_state_and_cannot_write(store: SqlCheckpointStore, postgres_url: str) -> None:
    await append(store, "thread", "first")

    def look(tx: Transaction) -> tuple[int, int]:
        count = "SELECT count(*) FROM threads"
        before = tx.connection.exec_driver_sql(count).scalar_one()
        with raw(postgres_url) as other:
            other.execute("INSERT INTO threads VALUES ('another')")
        return before, tx.connection.exec_driver_sql(count).scalar_one()

    assert await store._transactions.read(look) == (1, 1)
    with pytest.raises(RepositoryError) as caught:
        await store._transactions.read(lambda tx: tx.connection.exec_driver_sql("DELETE FROM threads"))
    assert caught.value.code is Code.READ_ONLY


KEPT = (
    "SELECT count(*) FROM pg_prepared_statements",
    "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'",
    "SELECT count(*) FROM pg_settings WHERE source = 'session' AND name <> 'client_encoding'",
    "SELECT count(*) FROM pg_class WHERE relpersistence = 't'",
)


async def test_sessions_keep_nothing_between_transactions(store: SqlCheckpointStore) -> None:
    """So a pooler may hand a connection to somebody else after each: no setting, prepared statement, lock or table stays."""
    found: list[Any] = []
    for number in range(12):  # psycopg would prepare what is repeated 5 times
        await append(store, f"thread-{number}", f"c-{number}")
        await store.head("thread-0")
    lease, pack_id = await acquire(store, "large")
    await store.add_pack(lease, pack_of(pack_id, *range(2_000)))
    for writes in (True, False):
        with store._transactions._database.connect(writes=writes) as connection:
            driver: Any = connection.connection.dbapi_connection
            found += [driver.execute(query).fetchone()[0] for query in KEPT]
    assert found == [0] * 8


async def test_every_transaction_has_its_time_limits(store: SqlCheckpointStore) -> None:
    settings = ("idle_in_transaction_session_timeout", "lock_timeout", "statement_timeout")

    def shown(tx: Transaction) -> list[str]:
        return [str(tx.connection.exec_driver_sql(f"SHOW {name}").scalar()) for name in settings]

    for transact in (store._transactions.read, store._transactions.write):
        assert await transact(shown) == ["20s", "10s", "5min"]


async def test_a_process_has_three_connections_at_most(store: SqlCheckpointStore, postgres_url: str) -> None:
    backends = set()
    on_statement(store, lambda connection, statement: backends.add(connection.info.backend_pid))
    work = [append(store, f"thread-{number}", f"c-{number}") for number in range(8)]
    await asyncio.gather(*work, *(store.head(f"thread-{number % 8}") for number in range(40)))
    assert 1 < len(backends) <= 3


async def test_the_servers_clock_decides_whatever_the_clients_says(
    store: SqlCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 36: a client whose clock is years off neither loses its lease nor takes another's."""
    lease, _ = await acquire(store, "thread", ttl=60)
    now, years = time.time_ns(), 10 * 365 * 86_400 * 10**9
    for skewed in (now - years, now + years):
        monkeypatch.setattr(time, "time_ns", lambda skewed=skewed: skewed)
        monkeypatch.setattr(time, "time", lambda skewed=skewed: skewed / 10**9)
        assert abs(await store.now() - now // 1000) < 600 * 10**6
        with pytest.raises(SnapcoreError) as caught:
            await store.acquire_writer("thread")
        assert caught.value.code is Code.WRITER_HELD
        assert (await store.renew_writer(lease)).expires_at > lease.expires_at


async def test_large_packs_are_entered_by_one_statement(store: SqlCheckpointStore) -> None:
    statements: list[str] = []
    on_statement(store, lambda connection, statement: statements.append(statement))
    lease, pack_id = await acquire(store, "thread")
    statements.clear()
    await store.add_pack(lease, pack_of(pack_id, *range(5_000)))
    assert len([s for s in statements if s.startswith("INSERT INTO chunks")]) == 1
    assert len(statements) < 10
    assert len(await store.locate([digest(number) for number in range(5_000)])) == 5_000


def test_a_password_in_the_drivers_own_words_is_left_out() -> None:
    error = explain(psycopg.OperationalError(f"something odd about {PASSWORD}"), "postgresql://host/db", [PASSWORD])
    assert "something odd about ***" in str(error)
