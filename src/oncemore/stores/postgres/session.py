"""Gets statements executed through whatever goes wrong: connects, makes the tables, and sends again what was lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan, Sleep
from ...errors import ConfigurationError, OncemoreError, StoreError, StoreTimeout, StoreUnavailable
from . import tables
from .connection import Link, Lost, Rejected, Rows, TimedOut
from .line import Line, Open, Send
from .statements import Statement, Statements

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
OPERATORS_PATIENCE = 60.0  # seconds; counting, purging and creating tables may take longer than a caller would wait

AGAIN = {"40001", "40P01"}  # serialization failure, deadlock: nothing happened, and the next try may be luckier
MADE_MEANWHILE = {"23505", "42P06", "42P07", "42710"}  # someone else has created the same tables
TOO_SLOW = {"55P03", "57014"}  # the lock's or the statement's time was up
NO_TABLE = {"3F000", "42P01"}
NO_RIGHT = "42501"
NOT_PREPARED = "26000"


class Database:
    """The server behind *conninfo*, as the store sees it: a line for its lanes, and one for operators' questions."""

    def __init__(self, conninfo: str, names: dict[str, str], *, create: bool, timeout: float) -> None:
        self.names = names
        self.sql = Statements(names)
        self.timeout = timeout
        self.shift = 0.0
        self.create = create
        self.lanes, self.desk = Line(conninfo), Line(conninfo)
        self.ready = False
        self.pooled = False  # a pooler stands between: nothing that is set or prepared is there next time

    def rows(
        self, line: Line, statement: Statement, values: Sequence[Any], ends: float, *, patience: float = 0.0
    ) -> Plan[Rows]:
        """The statement's rows.  Each may be sent twice, so what was lost on the way is sent again, until *ends*.

        With *patience*, a server that was reached may take so many seconds, whatever the time is.
        """
        pause, failure = 0.0, Exception("no time was left for it")
        while SYSTEM.monotonic() + pause < ends:
            if pause:
                yield Sleep(random.uniform(pause / 2, pause))
            link: Link | None = None
            try:
                link = yield Open(line, ends)
                if not link.greeted:
                    yield from self._greet(line, link, ends)
                until = max(ends, SYSTEM.monotonic() + patience) if patience else ends
                return (yield Send(link, statement, values, until))  # type: ignore[no-any-return]
            except Lost as error:
                pause, failure = more(pause), error
            except Rejected as error:
                pause, failure = more(pause), error
                if link is not None and error.sqlstate == NOT_PREPARED:  # a pooler, after all: prepare no more
                    self.pooled, link.alone = True, False
                elif error.sqlstate not in AGAIN:
                    raise
            finally:
                if link is not None:
                    link.home.put(link)
        raise given_up(failure) from failure

    def _greet(self, line: Line, link: Link, ends: float) -> Plan[None]:
        """Make a new connection fit for its work."""
        operators = line is self.desk
        limit = OPERATORS_PATIENCE if operators else self.timeout
        milliseconds = [str(int(1000 * seconds)) for seconds in (self.timeout / 5, limit)]
        greeting = self.sql.greet if operators else self.sql.greet_lane
        rows = yield Send(link, greeting, [link.pgconn.backend_pid, *milliseconds], ends)
        self.pooled = self.pooled or not rows
        if not self.ready:
            yield from self._make_tables(link)
            self.ready = True
        link.alone = not self.pooled
        link.greeted = True

    # Tables

    def _make_tables(self, link: Link) -> Plan[None]:
        ends = SYSTEM.monotonic() + OPERATORS_PATIENCE
        if (yield from self._is_current(link, ends)):
            return
        if not self.create:
            raise ConfigurationError(f"The tables are missing or outdated, and create=false; {HOW_TO_MAKE}")
        try:
            yield Send(link, Statement(tables.BEGIN.format(**self.names)), None, ends)
            if not (yield from self._is_current(link, ends)):
                version = yield from self._version(link, ends)
                yield Send(link, Statement(tables.script(self.names, since=version)), None, ends)
            yield Send(link, Statement("COMMIT"), None, ends)
        except BaseException as error:
            link.drop()  # and with it the transaction
            if not isinstance(error, Rejected):
                raise
            if error.sqlstate in AGAIN | MADE_MEANWHILE:
                raise Lost(str(error)) from error
            raise ConfigurationError(f"The tables could not be made: {error}; {HOW_TO_MAKE}") from error

    def _is_current(self, link: Link, ends: float) -> Plan[bool]:
        version = yield from self._version(link, ends)
        if version > len(tables.SCRIPTS):
            raise ConfigurationError(
                f"The tables are of version {version}, made by a newer release; this one knows {len(tables.SCRIPTS)}: "
                "upgrade it"
            )
        return version == len(tables.SCRIPTS)

    def _version(self, link: Link, ends: float) -> Plan[int]:
        ((known,),) = yield Send(link, self.sql.known, [], ends)
        ((version,),) = (yield Send(link, self.sql.version, [], ends)) if known else ((0,),)
        return version


HOW_TO_MAKE = "run the script that oncemore.stores.schema(url) returns, as a role that may create tables"


def more(pause: float) -> float:
    """How long to wait before the next attempt: an idle connection may only be stale, a server may be long in coming."""
    return min(2 * pause, LONGEST_PAUSE) if pause else FIRST_PAUSE


def given_up(failure: Exception) -> StoreError:
    """The error for a caller whose time is up."""
    if isinstance(failure, TimedOut):
        return StoreTimeout(f"PostgreSQL did not answer in time: {failure}")
    if isinstance(failure, Lost):
        return StoreUnavailable(f"PostgreSQL cannot be reached: {failure}")
    return StoreTimeout(f"PostgreSQL refused every attempt: {failure}")


def translated(failure: Rejected) -> OncemoreError:
    """The error for a caller whose statement was refused."""
    if failure.sqlstate in TOO_SLOW:
        error: OncemoreError = StoreTimeout(f"PostgreSQL took too long: {failure}")
    elif failure.sqlstate in NO_TABLE:
        error = ConfigurationError(f"The tables are missing: {failure}; {HOW_TO_MAKE}")
    elif failure.sqlstate == NO_RIGHT:
        error = ConfigurationError(
            f"A right is missing: {failure}; oncemore.stores.schema(url) lists what the role needs"
        )
    elif failure.sqlstate.startswith("53"):  # out of disk, memory or connections
        error = StoreUnavailable(f"PostgreSQL has no resources left: {failure}")
    else:
        error = StoreError(f"PostgreSQL refused the statement: {failure}")
    error.__cause__ = failure
    return error
