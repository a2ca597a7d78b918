"""A ledger in Redis or Valkey: fast, shared by many machines, and as durable as the server is configured to be.

    redis://[user:password@]host:6379/0          one server; rediss:// with TLS; redis:///run/redis.sock
    redis+sentinel://host1,host2/service/0       the primary that the sentinels name
    redis+cluster://host1:7000,host2:7000        a cluster; the records are spread over its nodes

Options, after `?`; all others are redis-py's own (`ssl_ca_certs=`, `client_name=`, ...), without its timeouts:

    prefix=oncemore      the first part of the names of all keys
    timeout=5s           the longest time that a call may take, with all attempts, before it fails
    poll=1s              how often a waiter looks by itself, in case a wake-up message is lost
    wait_replicas=0      how many replicas must have a write before it counts (WAIT); `all` with sentinels or in a cluster
    tls=true             for redis+sentinel:// and redis+cluster://
    sentinel_username=, sentinel_password=       the login of the sentinels, if they need one

A record is a msgpack array at `prefix:{digest}`.  Expired records that are kept for an audit move to
`prefix:{digest}:token`.  Running and held records never expire.  The server removes other expired records by itself, so
there is little to purge.  `list`, `purge` and `stats` scan the key space with SCAN: a record that is written meanwhile
may be missed, or listed twice.
"""

from __future__ import annotations

import random
import re
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import redis

from ..._ledger.connect import hide_password, take_options
from ..._ledger.decisions import fenced, not_deletable, not_resolvable
from ..._ledger.events import log
from ..._ledger.model import Claim, Holder, Lease, Operation, Outcome, Record
from ..._ledger.store import Filter, Page, Stats
from ..._runtime.batching import Submit
from ..._runtime.forks import reset_in_child
from ..._runtime.listening import CannotListen, Listener
from ..._runtime.plan import Plan, run
from ..._runtime.wakeups import Id, Wakeups
from ...errors import ConfigurationError, OncemoreError, StoreError
from .commands import ALL, CommandRunner, NodeBatchers, Scan, ScriptBatch, ScriptItem, reply_text
from .connection import Address
from .records import MICRO, clean, digest, encode, fields, micros, outcome_fields, read_record
from .scripts import CLAIM, DELETE, FIND, HOLD, RELEASE, RENEW, RESOLVE, SETTLE, TOUCH, UNCLAIM, Script
from .topology import Topology, read_topology

OPTIONS = {"prefix": "oncemore", "timeout": 5.0, "poll": 1.0, "wait_replicas": "0"}
PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
# The commands of the scripts, the commands that open and watch connections, and MGET for the copies of a tiered store.
ACL = (
    "+eval +evalsha +time +get +mget +set +del +rename +publish +subscribe +scan +ping +info +wait "
    "+select +client|setname +client|setinfo +cluster|slots +cluster|nodes +asking"
)
# With two smaller batches the server and this process work at the same time; with one large batch they take turns.
BATCH_LIMIT = 32
GRANTED = 4  # values in the answer to a granted claim of a known operation
MOST_PENDING = 1000  # undos; older ones are dropped, because in a long failure most claims never reach the server
SHORT_SECONDS = 1.0  # the timeout for work that delays a claim: the undo of other claims, the check of the server


def connect(url: str) -> RedisStore:
    """Return the ledger at *url*.  Nothing is opened before it is used."""
    return RedisStore(url)


def schema(url: str) -> str:
    """Return the command that creates a user with only the rights that the store needs.  There are no tables."""
    _, options = read_options(url)
    prefix = options["prefix"]
    return f"""\
# oncemore keeps its records under {prefix}:{{...}} and announces changes on {prefix}:changes.
# Nothing has to be created.  A user with no more rights than it needs:
ACL SETUSER {prefix} on >CHANGE-ME resetkeys ~{prefix}:* resetchannels &{prefix}:changes nocommands \
{ACL}
# (Redis 7.0 has no client|setinfo, and does not need it: leave it out there.)
# Run with maxmemory-policy noeviction, or records are lost while they are still needed.
# Run with appendonly yes and appendfsync always, or a crash loses the last second of claims and outcomes.
"""


class RedisStore:
    """A ledger in Redis.  Records are strings, verbs are scripts, and concurrent calls are sent in batches."""

    lender = None  # Redis has no transaction that an effect could join

    def __init__(self, url: str) -> None:
        self.url = hide_password(url)
        rest, options = read_options(url)
        self.wakeups = Wakeups()
        self.poll: float = options["poll"]
        self.shift = 0.0
        self.holder = Holder()
        self.prefix: str = options["prefix"]
        self.channel = f"{self.prefix}:changes"
        self.topology = read_topology(rest)
        self._replicas = ALL if options["wait_replicas"] == "all" else int(options["wait_replicas"])
        if self._replicas == ALL and not self.topology.fails_over:
            raise ConfigurationError(
                "wait_replicas=all needs sentinels or a cluster, because a single server does not know how many replicas "
                "it should have: write their number"
            )
        self._runner = CommandRunner(self.topology, self._common, timeout=options["timeout"])
        self._claims = NodeBatchers(
            self.topology, self._run_claims, limit=BATCH_LIMIT, linger=False, undo=self._undo_claims
        )
        self._writes = NodeBatchers(self.topology, self._run_writes, limit=BATCH_LIMIT, linger=False)
        self._scan = Scan(self._runner, self.prefix)
        self._listener = RedisListener(self.topology, self.channel, self.wakeups)
        self._pending_undos: deque[ScriptItem] = deque(maxlen=MOST_PENDING)
        self._reset()
        reset_in_child(self)
        weakref.finalize(self, self._listener.close)
        weakref.finalize(self, self.topology.unwatch)

    def _reset(self) -> None:
        self._checked = False  # whether `_check_server` has been called; the first claims do that

    def _common(self) -> tuple[int, str]:
        return round(self.shift * MICRO), self.channel

    def _name(self, id: Id) -> str:
        return f"{self.prefix}:{{{digest(id)}}}"

    def _write(self, script: Script, key: str, *args: Any) -> Submit[ScriptItem]:
        """Return the effect that calls *script* for one record, in a batch with other callers."""
        return Submit(self._writes.for_key(key), ScriptItem(script, key, args))

    def _run_writes(self, items: list[ScriptItem]) -> Plan[list[Any]]:
        return ScriptBatch(self._runner, items, self._replicas).run()

    # Claims

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]:
        id = operation.id
        name, holder = self._name(id), self.holder.next()
        about = fields(holder, operation.fingerprint, *id, operation.name)
        args = (micros(lease), about, encode(request) if request else b"")
        answer = yield Submit(self._claims.for_key(name), ScriptItem(CLAIM, name, args, holder))
        if isinstance(answer, int):
            return Lease(operation, answer, answer / MICRO + self.shift + lease)
        if len(answer) == GRANTED:
            token, lease_until, attempt, lapsed = answer
            return Lease(operation, token, lease_until / MICRO, attempt, lapsed == 1)
        return read_record(id, *answer)

    def _run_claims(self, claims: list[ScriptItem]) -> Plan[list[Any]]:
        if not self._checked and self.topology.fails_over:  # no thread watches the primary yet
            self.topology.known = False
        batch = yield from self._send_behind_undos(self.topology.address(claims[0].key), claims, self._replicas)
        if batch.unreplicated:
            yield from self._undo_claims(batch.unreplicated)
        results = batch.results[-len(claims) :]
        if not self._checked and not all(isinstance(result, OncemoreError) for result in results):
            yield from self._check_server()
        return results

    def _undo_claims(self, claims: Sequence[ScriptItem]) -> Plan[None]:
        """Undo claims that nobody will use.  If the server does not answer soon, the next claims undo them."""
        self._pending_undos.extend(map(undo_of, claims))
        yield from self._send_behind_undos(self.topology.address(claims[0].key), [], timeout=SHORT_SECONDS)

    def _send_behind_undos(
        self, node: Address, items: list[Any], replicas: int = 0, timeout: float | None = None
    ) -> Plan[ScriptBatch]:
        """Send all pending undos for *node*, then *items*, in one batch.  Unanswered claims become pending undos."""
        undos = self._take_pending_undos(node) if self._pending_undos else []
        batch = ScriptBatch(self._runner, [*undos, *items], replicas, timeout)
        try:
            yield from batch.run()
        except BaseException:  # the batcher undoes the claims of a batch that was interrupted
            self._pending_undos.extend(undos)
            raise
        self._pending_undos.extend(map(undo_of, batch.uncertain))
        return batch

    def _take_pending_undos(self, node: Address) -> list[ScriptItem]:
        """Take the pending undos for *node*, each only once, even if several threads and loops call this."""
        undos: list[ScriptItem] = []
        with suppress(IndexError):
            for _ in range(len(self._pending_undos)):
                undo = self._pending_undos.popleft()
                (undos if self.topology.address(undo.key) == node else self._pending_undos).append(undo)
        return undos

    def unclaim(self, claims: Sequence[Claim]) -> Plan[None]:
        undos = [ScriptItem(UNCLAIM, self._name(claim.operation.id), (claim.holder,)) for claim in claims]
        for result in (yield from self._runner.run(undos)):
            if isinstance(result, StoreError):
                raise result
        for claim in claims:
            self.wakeups.notify(claim.operation.id)

    def _check_server(self) -> Plan[None]:
        """Start the listener and the watchers of the primary, and warn if the server may forget records."""
        self._checked = True
        self._listener.listen()
        self.topology.watch()
        (about,) = yield from ScriptBatch(self._runner, [ScriptItem(None, "", ("INFO",))], timeout=SHORT_SECONDS).run()
        if isinstance(about, bytes):
            for warning in warnings(about, self._replicas):
                log.warning("%s %s", self.url, warning)

    # Verbs of the lease's owner

    def renew(self, held: Lease, *, lease: float) -> Plan[Lease]:
        until = check_owner((yield self._write(RENEW, self._name(held.operation.id), held.token, micros(lease))), held)
        return msgspec.structs.replace(held, expires_at=until / MICRO)

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        extras = fields(note, audit) if note or audit else b""
        args = (held.token, micros(retention), extras, outcome_fields(outcome))
        check_owner((yield self._write(SETTLE, self._name(held.operation.id), *args)), held)
        self.wakeups.notify(held.operation.id)

    def release(self, held: Lease, *, retention: float) -> Plan[None]:
        check_owner((yield self._write(RELEASE, self._name(held.operation.id), held.token, micros(retention))), held)
        self.wakeups.notify(held.operation.id)

    def hold(self, held: Lease, *, note: str = "") -> Plan[None]:
        check_owner((yield self._write(HOLD, self._name(held.operation.id), held.token, clean(note))), held)
        self.wakeups.notify(held.operation.id)

    # Verbs that need no lease

    def touch(self, record: Record, *, retention: float) -> Plan[None]:
        yield self._write(TOUCH, self._name(record.id), record.token, micros(retention))

    def watch(self, record: Record) -> Plan[None]:
        """Start the listener.  The claim that met *record* has marked it, so its next change sends a message."""
        self._listener.listen()
        yield from ()

    def find(self, scope: str, key: str) -> Plan[Record | None]:
        answer = yield self._write(FIND, self._name((scope, key)))
        return read_record((scope, key), *answer) if answer else None

    def list(self, where: Filter, *, limit: int = 100, cursor: str | None = None) -> Plan[Page]:
        return self._scan.page(where, limit, cursor)

    def resolve(
        self, scope: str, key: str, outcome: Outcome | None, *, retention: float, note: str = ""
    ) -> Plan[Record]:
        kept = ("settled", outcome_fields(outcome)) if outcome else ("released", b"")
        args = (self.holder.next(), micros(retention), clean(note), *kept)
        answer = yield self._write(RESOLVE, self._name((scope, key)), *args)
        if isinstance(answer, bytes):
            raise not_resolvable(answer.decode())
        self.wakeups.notify((scope, key))
        return read_record((scope, key), *answer)

    def delete(self, scope: str, key: str) -> Plan[bool]:
        answer = yield self._write(DELETE, self._name((scope, key)), self.holder.next(), scope, key)
        if answer < 0:
            raise not_deletable()
        self.wakeups.notify((scope, key))
        return bool(answer)

    def purge(self, *, batch: int = 1000) -> Plan[int]:
        return self._scan.purge(batch)

    def stats(self) -> Plan[Stats]:
        return self._scan.stats()

    def close(self) -> None:
        """Close the connections of threads, and stop the listener.  The next use opens them again."""
        self._reset()
        self._listener.close()
        self.topology.unwatch()
        for pool in self.topology.pools:
            pool.close()

    async def aclose(self) -> None:
        """Close also the connections of the running event loop, after its batches are done."""
        await self._claims.drain()
        await self._writes.drain()
        for pool in self.topology.pools:
            await pool.aclose()
        self.close()


def undo_of(item: ScriptItem) -> ScriptItem:
    """Return the item that undoes the claim *item*.  An undo is returned unchanged."""
    return ScriptItem(UNCLAIM, item.key, (item.holder,)) if item.script is CLAIM else item


def check_owner(answer: int, held: Lease) -> int:
    """Return the answer to a verb of the lease's owner.  Raises Fenced if it is 0: the lease is lost."""
    if not answer:
        raise fenced(held)
    return answer


def warnings(info: bytes, wait_replicas: int) -> Iterator[str]:
    """Yield how a server with this INFO may forget records.  Their operations would then run again."""
    values = dict(line.split(":", 1) for line in info.decode(errors="replace").splitlines() if ":" in line)
    replicas = int(values.get("connected_slaves", 0))
    if values.get("maxmemory_policy", "noeviction") != "noeviction":
        yield f"evicts records when its memory is full (maxmemory-policy {values['maxmemory_policy']}): set it to noeviction"
    if values.get("aof_enabled") == "0":
        yield "forgets records when it restarts (appendonly no): set appendonly to yes, and appendfsync to always"
    if replicas and "min_slaves_good_slaves" not in values:
        yield "accepts writes without replicas (min-replicas-to-write 0), and a failover loses them: set it to 1"
    if wait_replicas != ALL and wait_replicas < replicas:
        yield (
            f"forgets records in a failover to a replica that does not have them yet (wait_replicas={wait_replicas}): "
            f"write wait_replicas={replicas}, or all with sentinels or a cluster"
        )


def read_options(url: str) -> tuple[str, dict[str, Any]]:
    """Return the URL without our options, and the options.  Raises ConfigurationError for a wrong value."""
    rest, options = take_options(url, OPTIONS)
    if not PREFIX.fullmatch(options["prefix"]):
        raise ConfigurationError(f"prefix={options['prefix']}: use letters, digits and _ . : - only, at most 64")
    if options["wait_replicas"] != "all" and not options["wait_replicas"].isdecimal():
        raise ConfigurationError(f"wait_replicas={options['wait_replicas']}: write a number, or all")
    for name in ("timeout", "poll"):
        if options[name] <= 0:
            raise ConfigurationError(f"{name}={options[name]:g} in the store's URL must be greater than zero")
    return rest, options


# Notifications of records that other processes change

QUIET = 10.0  # seconds of silence after which the server is pinged, and seconds that it then has to answer


class RedisListener(Listener[Any]):
    """Passes every message on *channel* to *wakeups*.  Wakes all after each subscription: messages may be lost."""

    name = "oncemore-redis"

    def __init__(self, topology: Topology, channel: str, wakeups: Wakeups) -> None:
        super().__init__()
        self.topology = topology
        self.channel = channel
        self.wakeups = wakeups
        self._received_at = 0.0  # the time of the server's last message
        self._pinged = False  # whether the server was pinged since then
        self._changes = 0  # the value of `topology.changes` at the time of the subscription

    def connect(self) -> Any:
        """Return a redis-py PubSub that is subscribed.  Raises CannotListen if the user may not subscribe."""
        run(self.topology.locate(QUIET))  # the primary may be another server by now
        self._changes = self.topology.changes
        pubsub = self.topology.pool.connector.pubsub(random.choice(self.topology.primaries()), QUIET)
        try:
            pubsub.subscribe(self.channel)
            if pubsub.get_message(timeout=QUIET) is None:
                raise redis.TimeoutError("the server does not answer")
        except redis.ResponseError as error:
            pubsub.close()
            log.warning("Waiters poll, because this user may not subscribe to %s: %s", self.channel, reply_text(error))
            raise CannotListen(str(error)) from error
        except BaseException:
            pubsub.close()
            raise
        self._received_at, self._pinged = time.monotonic(), False
        self.wakeups.notify_all()
        return pubsub

    def receive(self, connection: Any, seconds: float) -> None:
        """Handle the next message, if one comes.  Raises redis.RedisError if the server is silent or was replaced."""
        message: dict[str, Any] | None = connection.get_message(timeout=min(seconds, QUIET))
        now = time.monotonic()
        if message is not None:
            self._received_at, self._pinged = now, False
            if message["type"] == "message":
                with suppress(RuntimeError, ValueError):  # a waiter's loop was just closed, or the message is not ours
                    self.wakeups.notify(read_id(message["data"]))
        elif self.topology.changes != self._changes:
            raise redis.ConnectionError("the primary has changed")
        elif now - self._received_at > 2 * QUIET:
            raise redis.TimeoutError("the server does not answer")
        elif now - self._received_at > QUIET and not self._pinged:
            connection.ping()
            self._pinged = True


def read_id(payload: bytes) -> Id:
    """Return the scope and the key from `<length of the scope in bytes>:<scope><key>`."""
    length, _, rest = payload.partition(b":")
    return rest[: int(length)].decode(), rest[int(length) :].decode()
