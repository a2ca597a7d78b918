"""Runs the store's statements on its own connections: sets up sessions, creates tables, and repeats lost statements."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import psycopg

from ..._ledger.model import Holder
from ..._ledger.tables import Feature
from ..._ledger.transactions import Do
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan, Sleep
from ...errors import ConfigurationError, OncemoreError, StoreError, StoreTimeout, StoreUnavailable
from . import tables
from .connection import Connections
from .pipeline import ALREADY_PREPARED, CHANGED_COLUMNS, NOT_PREPARED, AnswerTimeout, Pipeline, state_of
from .statements import Query, Rows, Statement, Statements

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
ADMIN_PATIENCE = 60.0  # seconds; counting, purging and creating tables may take longer than a caller would wait
ADMIN_CONNECTIONS = 2
# Seconds that a batch waits for a locked record.  Most locks are another claim's and last until its commit.  If an open
# transaction has the lock, the other callers in the batch must not wait for it.
LOCK_WAIT = 0.02

# The server sends these when it shuts down, or is not the primary.  Another connection may succeed.
SHUTTING_DOWN = {"57P01", "57P02", "57P03", "25006"}
SERIALIZATION_FAILURES = {"40001", "40P01"}  # also deadlocks; nothing happened, and the same may work next time
CREATED_MEANWHILE = {"23505", "42P06", "42P07", "42710"}  # another process has created the same tables
NO_LOCK = "55P03"
TOO_SLOW = {NO_LOCK, "57014"}  # the time for a lock or a statement has passed
IDLE_IN_TRANSACTION = "25P03"
NO_TABLE = {"3F000", "42P01"}
NO_RIGHT = "42501"


class Database:
    """The server at *conninfo*, with connections for claims and writes, and others for statements that take longer."""

    def __init__(self, conninfo: str, names: dict[str, str], *, create: bool, timeout: float, idle: float) -> None:
        self.conninfo = conninfo
        self.names = names
        self.sql = Statements(names)
        self.timeout = timeout
        self.idle = idle  # seconds that a transaction may send no statement before the server ends its session
        self.shift = 0.0
        self.create = create
        self.connections = Connections(conninfo)
        self.admin = Connections(conninfo, limit=ADMIN_CONNECTIONS)
        self.features = Connections(conninfo)  # for the tables of features
        self.holder = Holder()
        self._ready: set[str] = set()  # the names of features with existing tables; the ledger counts as a feature
        self.pooled = False  # whether a pooler is in between: sessions then lose settings and prepared statements

    def ready(self, feature: Feature | None = None) -> Plan[None]:
        """Create the tables of the ledger, or of *feature*, unless they are known to exist."""
        feature = feature or tables.LEDGER
        if feature.name not in self._ready:
            yield from self._patient_rows(self.admin, [], ADMIN_PATIENCE, feature)

    def rows(self, statement: Statement, values: Sequence[Any], deadline: float) -> Plan[Rows]:
        """Run a statement for claims or writes, and return its rows.  If its answer is lost, it is sent again.

        Raises a StoreError if the server does not answer before *deadline*, and psycopg.Error if it refuses.
        """
        (rows,) = yield from self._send(self.connections, [(statement, values)], deadline, deadline, tables.LEDGER)
        return rows

    def admin_rows(self, statement: Statement, values: Sequence[Any]) -> Plan[Rows]:
        """Run an operator's statement, and return its rows.  After the server was reached, it may take a minute."""
        (rows,) = yield from self._patient_rows(self.admin, [(statement, values)], ADMIN_PATIENCE, tables.LEDGER)
        return rows

    def feature_rows(self, queries: Sequence[Query], *, patient: bool) -> Plan[list[Rows]]:
        """Run statements of a feature in one transaction, and return the rows of each.  They may be sent twice."""
        patience = ADMIN_PATIENCE if patient else self.timeout
        return self._patient_rows(self.features, queries, patience, tables.LEDGER)

    def _patient_rows(
        self, connections: Connections, queries: Sequence[Query], patience: float, feature: Feature
    ) -> Plan[list[Rows]]:
        now = SYSTEM.monotonic()
        try:
            return (yield from self._send(connections, queries, now + self.timeout, now + patience, feature))
        except psycopg.Error as error:
            raise translate_error(error) from error

    def _send(
        self, connections: Connections, queries: Sequence[Query], deadline: float, answer_by: float, feature: Feature
    ) -> Plan[list[Rows]]:
        """Create the tables of *feature* if they are missing.  Then send *queries*, repeatedly until *deadline*."""
        pause, failure = 0.0, psycopg.Error("no time was left to send the statement")
        while SYSTEM.monotonic() + pause < deadline:
            if pause:
                yield Sleep(random.uniform(pause / 2, pause))
            connection: Any = None
            try:
                left = deadline - SYSTEM.monotonic()
                connection = yield Do(partial(connections.take, left), partial(connections.atake, left))
                if not state_of(connection).configured:
                    yield from self._configure(connections, connection, deadline)
                if feature.name not in self._ready:
                    yield from self._make_tables(connection, feature)
                sent = queries
                if self.pooled and connections is self.connections:
                    sent = [(self.sql.lock_wait, [milliseconds(LOCK_WAIT)]), *queries]
                results = yield Pipeline(connection, sent, answer_by)
                return results[-len(queries) :]  # type: ignore[no-any-return]
            except psycopg.Error as error:
                if error.sqlstate in (NOT_PREPARED, ALREADY_PREPARED):  # a pooler that was not detected before
                    self._prepare_nothing(connection)
                elif error.sqlstate == CHANGED_COLUMNS and not pause:
                    pass  # a migration: the statement is prepared again
                elif not is_lost(error) and error.sqlstate not in SERIALIZATION_FAILURES:
                    raise
                failure = error
                # Short at first: the connection may only be stale.  Then longer: the server may be restarting.
                pause = min(2 * pause, LONGEST_PAUSE) if pause else FIRST_PAUSE
            finally:
                if connection is not None:
                    connections.give_back(connection)
        raise give_up(failure) from failure

    def session_query(self, connections: Connections, connection: Any) -> Query:
        """Return the query that sets up a new connection's session.  It returns no row if a pooler is in between."""
        is_admin = connections is not self.connections
        seconds = (self.timeout / 5, ADMIN_PATIENCE) if is_admin else (LOCK_WAIT, self.timeout)
        values = [connection.pgconn.backend_pid, str(int(1000 * self.idle)), *map(milliseconds, seconds)]
        return self.sql.configure_admin if is_admin else self.sql.configure, values

    def _configure(self, connections: Connections, connection: Any, deadline: float) -> Plan[None]:
        """Set up the session of a new connection."""
        (rows,) = yield Pipeline(connection, [self.session_query(connections, connection)], deadline)
        if self.pooled or not rows:
            self._prepare_nothing(connection)
        state_of(connection).configured = True

    def _prepare_nothing(self, connection: Any) -> None:
        self.pooled = True
        self.connections.prepares = self.admin.prepares = self.features.prepares = False
        connection.prepare_threshold = None

    def _make_tables(self, connection: Any, feature: Feature) -> Plan[None]:
        """Bring the tables of *feature* to the latest version, one process at a time, in one transaction."""
        deadline = SYSTEM.monotonic() + ADMIN_PATIENCE
        version = yield from self._version(connection, feature, deadline)
        if version > feature.version:
            raise ConfigurationError(
                f"The tables of the {feature.name} are of version {version}, made by a newer release; this one knows "
                f"{feature.version}: upgrade it"
            )
        if version < feature.version:
            if not self.create:
                raise ConfigurationError(
                    f"The tables of the {feature.name} are missing or outdated, and create=false; {HOW_TO_CREATE}"
                )
            texts = [text.format(**self.names) for text in tables.BEGIN]
            texts += [tables.block(self.names, feature), "COMMIT"]
            try:
                yield Pipeline(connection, [(Statement(text), ()) for text in texts], deadline)
            except psycopg.Error as error:
                # `give_back` closes the connection, because it is in a transaction, which is then rolled back.
                if is_lost(error):
                    raise
                if error.sqlstate in SERIALIZATION_FAILURES | CREATED_MEANWHILE:
                    raise psycopg.OperationalError(str(error)) from error  # try again
                raise ConfigurationError(
                    f"The tables of the {feature.name} could not be created: {message_of(error)}; {HOW_TO_CREATE}"
                ) from error
        self._ready.add(feature.name)

    def _version(self, connection: Any, feature: Feature, deadline: float) -> Plan[int]:
        (((known,),),) = yield Pipeline(connection, [(self.sql.known, ())], deadline)
        if not known:
            return 0
        (rows,) = yield Pipeline(connection, [(self.sql.version, [feature.name])], deadline)
        return rows[0][0] if rows else 0

    def close(self) -> None:
        for connections in (self.connections, self.admin, self.features):
            connections.close()

    async def aclose(self) -> None:
        for connections in (self.connections, self.admin, self.features):
            await connections.aclose()


HOW_TO_CREATE = "run the script that oncemore.stores.schema(url) returns, as a role that may create tables"


def milliseconds(seconds: float) -> str:
    return str(max(1, int(1000 * seconds)))  # PostgreSQL takes 0 as no limit


def is_lost(error: psycopg.Error) -> bool:
    """Whether the connection failed: the statement may or may not have been carried out."""
    state = error.sqlstate
    if state is None:
        return isinstance(error, psycopg.OperationalError)
    return state in SHUTTING_DOWN or state.startswith("08")


def give_up(failure: psycopg.Error) -> StoreError:
    """Return the error for a caller that has no time left."""
    if isinstance(failure, AnswerTimeout):
        return StoreTimeout(f"PostgreSQL did not answer in time: {message_of(failure)}")
    if is_lost(failure):
        return StoreUnavailable(f"PostgreSQL cannot be reached: {message_of(failure)}")
    return StoreTimeout(f"PostgreSQL refused every attempt: {message_of(failure)}")


def message_of(error: Exception) -> str:
    """Return the server's message without its details, or the driver's message on one line."""
    primary: str | None = getattr(getattr(error, "diag", None), "message_primary", None)
    return primary or " ".join(str(error).split())


def translate_error(error: Exception, sqlstate: str | None = None) -> OncemoreError:
    """Return the error for a caller whose statement the server refused.  *error* may be of any driver."""
    state, message = sqlstate or getattr(error, "sqlstate", None) or "", message_of(error)
    if state in TOO_SLOW:
        translated: OncemoreError = StoreTimeout(f"PostgreSQL took too long: {message}")
    elif state in NO_TABLE:
        translated = ConfigurationError(f"The tables are missing: {message}; {HOW_TO_CREATE}")
    elif state == NO_RIGHT:
        translated = ConfigurationError(
            f"A right is missing: {message}; oncemore.stores.schema(url) lists the rights that the role needs"
        )
    elif state == IDLE_IN_TRANSACTION:
        translated = StoreTimeout(
            f"PostgreSQL has rolled the transaction back: {message}; pause for less time between two statements, or "
            "raise idle_in_transaction= in the store's URL"
        )
    elif state.startswith("53"):  # out of disk, memory or connections
        translated = StoreUnavailable(f"PostgreSQL has no resources left: {message}")
    else:
        translated = StoreError(f"PostgreSQL refused the statement: {message}")
    translated.__cause__ = error
    return translated
