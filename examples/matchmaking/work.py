"""One change of the database: the transaction that it is in, the effects that it reports, and the faults of tests.

With the ledger in the database, oncemore lends the transaction, so the rows commit together with the record of the key.
With the ledger in Redis, the middleware holds a lease there while the change runs in a transaction of the database.  That
transaction also writes a record of the operation, and its unique record.  If the process dies, the next attempt looks for
the operation's record to learn whether the change was committed (`look_up`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from examples.sql import Row, read_connection, rows, transaction
from oncemore import Contract, Guard, Op, Outcome, Policy, Resolution, current_operation

from .problems import Broken
from .settings import Settings
from .tables import EFFECTS_LOCK, PAIRS_LOCK

Change = Callable[["Work"], Awaitable[Any]]

JSON = (("content-type", "application/json"),)
USER = "matchmaking.user"  # in the ASGI scope: the user that the request's token names
UNIQUE = "matchmaking.unique"  # in the ASGI scope: the rendered `unique_by` of the request


@dataclass
class Work:
    """A change in progress: *connection* is in its transaction, *user* is the caller, *now* the time of the service.

    *op* is the operation of the transaction; None if the request is not guarded.
    """

    connection: Any
    user: str
    now: float
    op: Op | None = None
    effects: list[tuple[str, str | None, str]] = field(default_factory=list)

    @property
    def served(self) -> bool:
        """Whether the database is PostgreSQL, where transactions run side by side; SQLite has one writer at a time."""
        return isinstance(self.connection, psycopg.AsyncConnection)

    @property
    def guarded(self) -> Op:
        assert self.op is not None, "the contract guards this request"
        return self.op

    async def rows(self, text: str, *values: Any) -> list[Row]:
        return await rows(self.connection, text, *values)

    async def lock_pair(self, one: str, other: str) -> None:
        """Have all changes of the pair's offers run one after the other."""
        if self.served:
            await self.rows("SELECT pg_advisory_xact_lock(?, hashtext(?))", PAIRS_LOCK, f"{sorted((one, other))}")

    def report(self, kind: str, ref: str, user: str | None = None) -> None:
        """Note an effect, for tests to count."""
        self.effects.append((kind, user or self.user or None, ref))

    async def write_effects(self) -> None:
        """Write the effects, as the last rows of the transaction, because other transactions wait for the lock."""
        if self.effects and self.served:
            await self.rows("SELECT pg_advisory_xact_lock(?)", EFFECTS_LOCK)
        for effect in self.effects:
            await self.rows("INSERT INTO effects (kind, user_id, ref) VALUES (?, ?, ?)", *effect)


class Service:
    """The parts that all endpoints share: the guards, the clock, and `perform`, which makes a change.

    *guard* has the keys of requests.  *database* is the guard of the database; without Redis, both are the same object.
    """

    def __init__(self, settings: Settings, guard: Guard, database: Guard) -> None:
        self.settings = settings
        self.guard = guard
        self.database = database
        self.contract = Contract()  # replaced by the loaded contract, which needs `look_up`

    def now(self) -> float:
        """Return the time; a test moves it together with the ledger's."""
        return time.time() + self.database.store.shift

    def read(self) -> Any:
        return read_connection(self.settings.database)

    async def perform(self, request: Request, change: Change, status: int = 200) -> Response:
        """Make a change in its transaction, and return the answer."""
        user: str = request.scope.get(USER, "")
        fault = request.headers.get("x-test-fault", "") if self.settings.test_hooks else ""
        kind, _, milliseconds = fault.partition(":")
        if kind == "slow" and milliseconds.isdecimal():
            await asyncio.sleep(int(milliseconds) / 1000)
        found = self.contract.match(request.method, request.url.path)
        if found is None or not found.rule.idempotent or found.rule.key.source == "none":
            async with transaction(self.settings.database) as connection:
                return answer(await self.change(Work(connection, user, self.now()), change, fault), status)
        op = current_operation()
        if self.guard is self.database:
            return answer(await self.change(Work(op.connection, user, self.now(), op), change, fault), status)
        rule = found.rule.policy
        inner = msgspec.structs.replace(op.operation, unique=request.scope.get(UNIQUE))
        policy = Policy(effect="transaction", ttl=rule.ttl, on_unique=rule.on_unique)
        async with self.database.attempt(inner, policy=policy) as attempt:
            if attempt.fresh:
                work = Work(attempt.op.connection, user, self.now(), attempt.op)
                made = answer(await self.change(work, change, fault), status)
                attempt.result = Outcome("response", made.status_code, JSON, bytes(made.body))
        return Response(attempt.value.body, attempt.value.status, dict(attempt.value.headers))

    async def change(self, work: Work, change: Change, fault: str = "") -> Any:
        """Call *change*, and write its effects; then cause the *fault* if a test has requested it."""
        result = await change(work)
        if self.settings.test_hooks:
            await work.write_effects()
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "error":
            raise Broken("The rows are written, and are rolled back now")
        return result

    async def look_up(self, op: Op) -> Resolution:
        """Find out by the record in the database whether an attempt that has vanished was committed."""
        record = await self.database.afind(op.operation.scope, op.key)
        if record is None or record.outcome is None:
            return Resolution.released()
        return Resolution.settled(record.outcome)


def answer(content: Any, status: int) -> Response:
    return Response(status_code=status) if status == 204 else JSONResponse(content, status)


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(8)}"


def iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
