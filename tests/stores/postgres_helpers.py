"""A second pair of hands on a Postgres server, and a wire that can be cut."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from sqlalchemy import event, make_url

from snapcore.stores.sql import SqlCheckpointStore

PATIENCE = 60.0
COMMIT = b"COMMIT\0"


@contextlib.contextmanager
def raw(url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection past the store: each statement its own transaction, unless BEGIN is said."""
    with psycopg.connect(conninfo(url), autocommit=True) as connection:
        if schema := make_url(url).query.get("schema"):
            connection.execute(f'SET search_path = "{schema}"'.encode())
        yield connection


def conninfo(url: str) -> str:
    """The address as libpq reads it."""
    bare = make_url(url).set(drivername="postgresql").difference_update_query(["schema"])
    return bare.render_as_string(hide_password=False)


def value(connection: psycopg.Connection[Any], statement: str, *parameters: Any) -> Any:
    """The only value that a statement returns."""
    row = connection.execute(statement.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def named(url: str, name: str) -> str:
    """The address with a name by which the server tells the store's connections."""
    return make_url(url).update_query_dict({"application_name": name}).render_as_string(hide_password=False)


def wait_until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def wait_for_lock(connection: psycopg.Connection[Any], name: str) -> None:
    """Until a connection of that name waits for a lock."""
    statement = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
    wait_until(lambda: value(connection, statement, name) > 0, "a lock that is waited for")


def on_statement(store: SqlCheckpointStore, act: Callable[[psycopg.Connection[Any], str], None]) -> None:
    """Call `act` with the connection and the statement before the store sends any within a transaction; COMMIT too."""
    engine = store._transactions._database.engine

    def before(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        act(cursor.connection, statement)

    def commit(connection: Any) -> None:
        act(connection.connection.dbapi_connection, "COMMIT")

    event.listen(engine, "before_cursor_execute", before)
    event.listen(engine, "commit", commit)


class Wire:
    """A TCP proxy before a server, whose connections can be cut at a message of the client's.

    `cut(number)` is about the client's messages that come after it, counted from 1, or, with `commits`, about its COMMITs;
    `late` lets the server get the message and answer it before the wire is cut, so that only the answer is lost.
    """

    def __init__(self, url: str) -> None:
        server = make_url(url)
        self._server = (server.host or "127.0.0.1", server.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = server.set(host="127.0.0.1", port=self._listener.getsockname()[1]).render_as_string(hide_password=False)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._muted: set[socket.socket] = set()  # clients that get no answer any more
        self._cut_at = 0
        self._commits = False
        self._late = False
        self._refusing = False
        self.seen = 0
        self.cuts = 0
        self._start(self._accept)

    def cut(self, number: int, *, late: bool, commits: bool = False) -> None:
        with self._lock:
            self._cut_at, self._late, self._commits, self.seen = number, late, commits, 0

    def down(self) -> None:
        """Cut every connection and refuse new ones, as a server that is restarted does."""
        self._refusing = True
        self._cut_all()

    def up(self) -> None:
        self._refusing = False

    def close(self) -> None:
        self._refusing = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut_all()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                client.close()
                continue
            server = socket.create_connection(self._server)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open += [client, server]
            self._start(self._forward, client, server)
            self._start(self._back, server, client)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                strikes = self._strikes(data)
                if strikes and not self._late:
                    break
                if strikes:
                    self._muted.add(client)
                server.sendall(data)
        if client not in self._muted:
            _cut(client, server)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := server.recv(1 << 20)) and client not in self._muted:
                client.sendall(data)
        _cut(client, server)

    def _strikes(self, data: bytes) -> bool:
        with self._lock:
            self.seen += not self._commits or COMMIT in data
            strikes = bool(self._cut_at) and self.seen == self._cut_at and (not self._commits or COMMIT in data)
            self._cut_at = 0 if strikes else self._cut_at
            self.cuts += strikes
            return strikes

    def _cut_all(self) -> None:
        _cut(*self._open)
        self._open.clear()


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
