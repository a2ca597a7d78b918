"""A ledger in PostgreSQL that copies its settled outcomes to Redis, and answers replays from there.

    redis+postgresql://user@host/db?redis=redis%3A%2F%2Fhost%3A6379%2F0

Everything before `redis=` is the URL of the PostgreSQL ledger, with all of its options.  The value of `redis=` is the
URL of the Redis server, percent-encoded.  Needs `pip install 'oncemore[postgres,redis]'`.  Other options:

    budget=5ms     how long a lookup in Redis may take before the request goes on with PostgreSQL
    cap=1h         how long a copy is kept at most, even if the outcome is kept for longer
    largest=65536  outcomes of more bytes than this are not copied

Every settle and release goes to PostgreSQL.  A claim looks in Redis first.  If it finds a copy of the settled outcome,
the request is answered without PostgreSQL; otherwise PostgreSQL decides.  Settled outcomes never change, so copies are
safe under these rules:

- A copy is written after the commit, never before.  The absence of a record is never stored.
- The name of a copy contains the identity and the timeline of the PostgreSQL server.  A promoted server has another
  timeline, so copies of outcomes that a failover has lost are not found any more.
- Copies are used only while this process's own connection to the primary is open and answers.
- A copy is not used if it is damaged, expired, or of another version, operation or fingerprint.
- If a record is deleted or resolved, its copy is replaced by a mark, before and after the change.  No process can write
  a copy while the mark is there.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast
from urllib.parse import quote

from ..._ledger.connect import connect as connect_store
from ..._ledger.connect import hide_password, take_options
from ..._ledger.encrypted import StoreWrapper
from ..._ledger.model import Lease, Operation, Outcome, Record
from ..._ledger.store import STORE_FAILURES, Store, TierCounts
from ..._ledger.transactions import Transaction, TransactionSource
from ..._runtime.plan import Plan
from ...errors import ConfigurationError
from ..postgres import PostgresStore
from ..postgres import schema as postgres_schema
from ..redis import RedisStore
from .copies import Copies, Moment

OPTIONS: dict[str, Any] = {"redis": "", "budget": 0.005, "cap": 3600.0, "largest": 65536}


def connect(url: str) -> TieredStore:
    """Return the ledger at *url*.  Nothing is opened before it is used."""
    scheme, _, rest = url.partition("://")
    if scheme == "redis+sqlite":
        raise no_primary("SQLite")
    address, options = take_options(rest, OPTIONS)
    if not options["redis"]:
        raise ConfigurationError(
            f"{hide_password(url)} names no Redis: add ?redis= and its URL, percent-encoded, as in redis=redis%3A%2F%2Fhost%2F0"
        )
    primary = PostgresStore(f"postgresql://{address}")
    try:
        cache = RedisStore(options["redis"])
    except ConfigurationError as error:
        raise ConfigurationError(f"redis= in the store's URL: {error.detail}") from error
    return TieredStore(primary, cache, budget=options["budget"], cap=options["cap"], largest=options["largest"])


def schema(url: str) -> str:
    """Return the script that creates the tables of the primary.  Redis needs no tables."""
    address, _ = take_options(url.partition("://")[2], OPTIONS)
    return postgres_schema(f"postgresql://{address}")


def no_primary(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} cannot be the primary of a tiered store: use a PostgreSQL URL. SQLite needs no copies, because it "
        "answers faster than Redis; Redis and memory may lose records"
    )


class TieredStore(StoreWrapper):
    """A PostgreSQL ledger with copies of its settled outcomes in Redis.

    Args:
        primary: The PostgreSQL ledger, or its URL, or your own pool or engine.
        cache: The Redis store, or its URL.
        budget: The longest time for a lookup in Redis, in seconds.
        cap: The longest time for which a copy is kept, in seconds.
        largest: The largest outcome that is copied, in bytes.
    """

    def __init__(
        self,
        primary: Any,
        cache: Any,
        *,
        budget: float = OPTIONS["budget"],
        cap: float = OPTIONS["cap"],
        largest: int = OPTIONS["largest"],
    ) -> None:
        primary = primary if hasattr(primary, "claim") else connect_store(primary)
        if not isinstance(primary, PostgresStore):
            raise no_primary(type(primary).__name__.removesuffix("Store").replace("Sqlite", "SQLite"))
        cache = connect_store(cache) if isinstance(cache, str) else cache
        if not isinstance(cache, RedisStore):
            raise ConfigurationError(
                f"The cache of a tiered store has to be Redis: a redis:// URL or a RedisStore, not a {type(cache).__name__}"
            )
        if budget <= 0 or cap <= 0:
            raise ConfigurationError(f"budget = {budget:g} s and cap = {cap:g} s: both must be greater than zero")
        super().__init__(cast("Store", primary))
        shown = quote(cache.url, safe="")
        self.url = f"redis+{primary.url}{'&' if '?' in primary.url else '?'}redis={shown}"
        self._primary = primary
        self._cache = cache
        self._copies = Copies(primary, cache, budget=budget, cap=cap, largest=largest)

    @property
    def tiers(self) -> TierCounts:
        """How often this process asked Redis, and how Redis answered."""
        return self._copies.counts()

    @property
    def lender(self) -> TransactionSource | None:
        inner = self.inner.lender
        return None if inner is None else cast("TransactionSource", TieredSource(inner, self._copies))

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]:
        return self._copies.find_or_claim(operation, self.inner.claim(operation, lease=lease, request=request))

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        asked = self._copies.moment()
        is_first = yield from self._primary.settle_first(held, outcome, retention, audit=audit, note=note)
        if is_first and asked is not None:  # if it was settled before, the record may have another outcome
            self._copies.keep_settled(held, outcome, retention, asked)

    def touch(self, record: Record, *, retention: float) -> Plan[None]:
        """Restart the record's retention.  If it now ends earlier, remove the copy, which would last too long."""
        earlier = record.expires_at is not None and record.now + retention < record.expires_at
        if earlier:
            with suppress(*STORE_FAILURES):  # after *cap* seconds, the copy expires by itself
                yield from self._copies.forget(record.id)
        yield from self.inner.touch(record, retention=retention)
        if earlier:
            yield from self._forget_again(record.id)

    def resolve(
        self, scope: str, key: str, outcome: Outcome | None, *, retention: float, note: str = ""
    ) -> Plan[Record]:
        yield from self._copies.forget((scope, key))
        record = yield from self.inner.resolve(scope, key, outcome, retention=retention, note=note)
        yield from self._forget_again((scope, key))
        return record

    def delete(self, scope: str, key: str) -> Plan[bool]:
        yield from self._copies.forget((scope, key))
        deleted = yield from self.inner.delete(scope, key)
        yield from self._forget_again((scope, key))
        return deleted

    def _forget_again(self, id: tuple[str, str]) -> Plan[None]:
        """Mark the copy again after the change, because the change may have taken longer than the first mark lasts."""
        with suppress(*STORE_FAILURES):
            yield from self._copies.forget(id)

    def close(self) -> None:
        self._copies.close()
        self._cache.close()
        self.inner.close()

    async def aclose(self) -> None:
        await self._copies.aclose()
        await self._cache.aclose()
        await self.inner.aclose()


class TieredSource:
    """Opens transactions of the primary; their outcomes are copied after the commit."""

    def __init__(self, inner: TransactionSource, copies: Copies) -> None:
        self.inner = inner
        self._copies = copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self) -> Plan[Transaction]:
        transaction = yield from self.inner.open()
        return cast("Transaction", TieredTransaction(transaction, self._copies))


class TieredTransaction:
    """A transaction of the primary.  A duplicate is answered from a copy, and outcomes are copied after the commit."""

    def __init__(self, inner: Transaction, copies: Copies) -> None:
        self.inner = inner
        self._copies = copies
        self._settled: list[tuple[Lease, Outcome, float, Moment]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, operation: Operation, *, lease: float, wait: float, request: bytes = b"") -> Plan[Lease | Record]:
        """Claim the operation.  If there is a copy of its outcome, no transaction is opened."""
        beginning = self.inner.begin(operation, lease=lease, wait=wait, request=request)
        return self._copies.find_or_claim(operation, beginning)

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        asked = self._copies.moment()
        if asked is not None:
            self._settled.append((held, outcome, retention, asked))
        return self.inner.settle(held, outcome, retention=retention, audit=audit, note=note)

    def commit(self) -> Plan[None]:
        yield from self.inner.commit()
        for settled in self._settled:
            self._copies.keep_settled(*settled)
