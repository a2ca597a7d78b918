"""The verbs of the ledger in Redis or Valkey."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from ..._ledger.connect import hide_password, take_options
from ..._ledger.decisions import fenced, not_deletable, not_resolvable
from ..._ledger.events import log
from ..._ledger.model import Lease, Operation, Outcome, Record
from ..._ledger.store import Filter, Holder, Page, Stats
from ..._runtime.batching import Batcher, Submit
from ..._runtime.forks import reset_in_child
from ..._runtime.plan import Plan
from ..._runtime.wakeups import Id, Wakeups
from ...errors import ConfigurationError, StoreError
from .anyones import DELETE, LOOK, RESOLVE
from .commands import Flights, Item, Plain, TooFewReplicas
from .listener import Listener
from .nodes import NodeBatchers
from .records import MICRO, HeldLease, clean, digest, fields, micros, outcome_fields, read_record
from .scan import Bundle, Walk
from .scripts import CLAIM, HOLD, RELEASE, RENEW, SETTLE, TOUCH, UNCLAIM
from .topology import read_places

OPTIONS = {"prefix": "oncemore", "timeout": 5.0, "poll": 1.0, "wait_replicas": 0}
PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
# What the scripts call, and what the connections are opened and watched with.
ACL = (
    "+eval +evalsha +time +get +set +del +rename +publish +subscribe +scan +ping +info +wait "
    "+select +client|setname +client|setinfo +cluster|slots +asking"
)
# Two smaller groups keep the server and this process at work at the same time; one large one makes them take turns.
GROUP = 32
GRANTED = 4  # so many parts has the answer to a claim that was granted, and not for the first time


def connect(url: str) -> RedisStore:
    """The ledger behind *url*; nothing is opened before it is used."""
    return RedisStore(url)


def schema(url: str) -> str:
    """A user with just the rights that the store needs; there are no tables to create."""
    _, options = read_options(url)
    prefix = options["prefix"]
    return f"""\
# oncemore keeps its records under {prefix}:{{...}} and announces changes on {prefix}:rung.
# Nothing has to be created.  A user with no more rights than it needs:
ACL SETUSER {prefix} on >CHANGE-ME resetkeys ~{prefix}:* resetchannels &{prefix}:rung nocommands \
{ACL}
# (Redis 7.0 has no client|setinfo, and does not need it: leave it out there.)
# Run with maxmemory-policy noeviction, or records are lost while they are still needed.
# Run with appendonly yes and appendfsync always, or a crash loses the last second of claims and outcomes.
"""


class RedisStore:
    """Records as strings, verbs as scripts; what callers ask for at the same time travels together."""

    lender = None  # there is no transaction that an effect could join

    def __init__(self, url: str) -> None:
        self.url = hide_password(url)
        rest, options = read_options(url)
        self.wakeups = Wakeups()
        self.poll: float = options["poll"]
        self.shift = 0.0
        self.holder = Holder()
        self.prefix: str = options["prefix"]
        self.channel = f"{self.prefix}:rung"
        self.places = read_places(rest, timeout=options["timeout"] / 2)
        if options["wait_replicas"] and not self.places.grouped:
            raise ConfigurationError("wait_replicas= is for a primary with replicas, not for a cluster")
        self._timeout: float = options["timeout"]
        self._replicas: int = options["wait_replicas"]
        self._flights: list[Flights] = []
        self._claims = self._batcher(self._fly_claims, unclaim, undo=self._undo)
        self._writes = self._batcher(Flights.fly)
        self._walk = Walk(self._new_flights(), self.prefix)
        self._listener = Listener(self.places, self.channel, self.wakeups)
        self._reset()
        reset_in_child(self)
        weakref.finalize(self, self._listener.stop)

    def _reset(self) -> None:
        self._looked = False  # at the server, with the first claim

    def _batcher(
        self,
        fly: Callable[[Flights, list[Any]], Plan[list[Any]]],
        owes: Callable[[Item], Item] | None = None,
        **options: Any,
    ) -> Batcher[Any]:
        def one() -> Batcher[Any]:
            flights = self._new_flights(replicas=self._replicas, undo=owes)
            return Batcher(partial(fly, flights), limit=GROUP, linger=False, **options)

        return one() if self.places.grouped else NodeBatchers(one, self.places.place)

    def _new_flights(self, *, replicas: int = 0, undo: Callable[[Item], Item] | None = None) -> Flights:
        flights = Flights(self.places, self._common, timeout=self._timeout, replicas=replicas, undo=undo)
        self._flights.append(flights)
        return flights

    def _common(self) -> tuple[int, str]:
        return round(self.shift * MICRO), self.channel

    def _name(self, id: Id) -> str:
        return f"{self.prefix}:{{{digest(id)}}}"

    def _held(self, lease: Lease) -> str:
        return lease.record if isinstance(lease, HeldLease) else self._name(lease.operation.id)

    # Claims

    def claim(self, operation: Operation, *, lease: float) -> Plan[Lease | Record]:
        id = operation.id
        name = self._name(id)
        about = fields(self.holder.next(), operation.fingerprint, *id, operation.name)
        answer = yield Submit(self._claims, Item(CLAIM, name, (micros(lease), about)))
        if isinstance(answer, int):
            return HeldLease(operation, answer, answer / MICRO + self.shift + lease, record=name)
        if len(answer) == GRANTED:
            token, lease_until, attempt, lapsed = answer
            return HeldLease(operation, token, lease_until / MICRO, attempt, lapsed == 1, record=name)
        return read_record(id, *answer)

    def _fly_claims(self, flights: Flights, items: list[Any]) -> Plan[list[Any]]:
        """The claims; those that do not count, for want of replicas, are given back: nobody will perform them."""
        answers = yield from (flights.fly(items) if self._looked else self._fly_and_look(flights, items))
        if self._replicas:
            short = zip(items, answers, strict=True)
            bundle: Bundle = [unclaim(item) for item, answer in short if isinstance(answer, TooFewReplicas)]
            if bundle:
                with suppress(StoreError):  # where that fails, they lapse
                    yield Submit(self._walk.lane, bundle)
        return answers

    def _fly_and_look(self, flights: Flights, items: list[Any]) -> Plan[list[Any]]:
        """The first claims, and with them a look at the server; from now on the guard's cache hears of deletions."""
        self._listener.start()
        *answers, told = yield from flights.fly([*items, Plain(("INFO", "memory"))])
        self._looked = not all(isinstance(answer, StoreError) for answer in answers)
        if isinstance(told, bytes):  # one that does not tell is trusted
            self._warn_of_eviction(told)
        return answers

    def _warn_of_eviction(self, memory: bytes) -> None:
        policy = re.search(rb"maxmemory_policy:(\S+)", memory)
        if policy and policy[1] != b"noeviction":
            log.warning(
                "%s evicts records when its memory is full (maxmemory-policy %s), and what was done may be done again: "
                "set it to noeviction",
                self.url,
                policy[1].decode(),
            )

    def _undo(self, items: list[Item]) -> Plan[None]:
        """Give back what was granted to callers that have gone."""
        bundle: Bundle = [unclaim(item) for item in items]
        yield Submit(self._walk.lane, bundle)

    # The owner's verbs

    def renew(self, held: Lease, *, lease: float) -> Plan[Lease]:
        item = Item(RENEW, self._held(held), (held.token, micros(lease)))
        until = owned((yield Submit(self._writes, item)), held)
        return msgspec.structs.replace(held, expires_at=until / MICRO)

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        extras = fields(note, audit) if note or audit else b""
        args = (held.token, micros(retention), extras, outcome_fields(outcome))
        owned((yield Submit(self._writes, Item(SETTLE, self._held(held), args))), held)
        self.wakeups.notify(held.operation.id)

    def release(self, held: Lease, *, retention: float) -> Plan[None]:
        owned((yield Submit(self._writes, Item(RELEASE, self._held(held), (held.token, micros(retention))))), held)
        self.wakeups.notify(held.operation.id)

    def hold(self, held: Lease, *, note: str = "") -> Plan[None]:
        owned((yield Submit(self._writes, Item(HOLD, self._held(held), (held.token, clean(note))))), held)
        self.wakeups.notify(held.operation.id)

    # Anyone's

    def touch(self, record: Record, *, retention: float) -> Plan[None]:
        yield Submit(self._writes, Item(TOUCH, self._name(record.id), (record.token, micros(retention))))

    def watch(self, record: Record) -> Plan[None]:
        """The claim that was stopped has asked for a message; someone listens."""
        self._listener.start()
        yield from ()

    def find(self, scope: str, key: str) -> Plan[Record | None]:
        answer = yield Submit(self._writes, Item(LOOK, self._name((scope, key))))
        return read_record((scope, key), *answer) if answer else None

    def list(self, where: Filter, *, limit: int = 100, cursor: str | None = None) -> Plan[Page]:
        return self._walk.page(where, limit, cursor)

    def resolve(
        self, scope: str, key: str, outcome: Outcome | None, *, retention: float, note: str = ""
    ) -> Plan[Record]:
        kept = ("settled", outcome_fields(outcome)) if outcome else ("released", b"")
        args = (self.holder.next(), micros(retention), clean(note), *kept)
        answer = yield Submit(self._writes, Item(RESOLVE, self._name((scope, key)), args))
        if isinstance(answer, bytes):
            raise not_resolvable(answer.decode())
        self.wakeups.notify((scope, key))
        return read_record((scope, key), *answer)

    def delete(self, scope: str, key: str) -> Plan[bool]:
        args = (self.holder.next(), scope, key)
        answer = yield Submit(self._writes, Item(DELETE, self._name((scope, key)), args))
        if answer < 0:
            raise not_deletable()
        self.wakeups.notify((scope, key))
        return bool(answer)

    def purge(self, *, batch: int = 1000) -> Plan[int]:
        return self._walk.purge(batch)

    def stats(self) -> Plan[Stats]:
        return self._walk.stats()

    # The end

    def close(self) -> None:
        """End this process's connections and thread, but for those of event loops; the next use opens them again."""
        self._reset()
        self._listener.stop()
        for flights in tuple(self._flights):
            flights.close()

    async def aclose(self) -> None:
        """As `close`, for the running event loop too, once nothing is in flight on it."""
        for batcher in (self._claims, self._writes, self._walk.lane):
            await batcher.drain()
        for flights in tuple(self._flights):
            await flights.aclose()
        self.close()


def unclaim(item: Item) -> Item:
    """What takes back a claim, if it was granted, that nobody will use."""
    return Item(UNCLAIM, item.key, item.args[1:]) if item.script is CLAIM else item


def owned(answer: int, held: Lease) -> int:
    """The answer to an owner's verb; to a late owner's it is 0."""
    if not answer:
        raise fenced(held)
    return answer


def read_options(url: str) -> tuple[str, dict[str, Any]]:
    """The URL without our options, and the options, checked."""
    rest, options = take_options(url, OPTIONS)
    if not PREFIX.fullmatch(options["prefix"]):
        raise ConfigurationError(f"prefix={options['prefix']}: use letters, digits and _ . : - only, at most 64")
    for name in ("timeout", "poll"):
        if options[name] <= 0:
            raise ConfigurationError(f"{name}= in the store's URL must be longer than nothing")
    return rest, options
