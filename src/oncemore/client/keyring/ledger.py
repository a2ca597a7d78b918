"""The keyring in a ledger: any store keeps keys and requests, for many machines, and a lease tells which process sends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
from msgspec.structs import replace

from ..._ledger.connect import connect
from ..._ledger.decisions import is_free
from ..._ledger.model import Lease, Operation, Outcome, Record
from ..._ledger.store import Filter, Store
from ..._runtime.clock import SYSTEM
from ..._runtime.forks import reset_in_child
from ..._runtime.heartbeat import Heartbeat, Renewal
from ..._runtime.plan import Plan
from ...errors import ConfigurationError, CorruptRecord, Fenced, Refusal, StoreError
from ..errors import KeyringError
from ..story import log
from .entry import CLOCK_TOLERANCE, RETENTION, Entry, State, check_reuse, is_sendable

# The name of our operations in the ledger, and the beginning of their scopes.
NAME = "oncemore.keyring"

# Seconds after which an operation can be resumed if its process has died.
LEASE = 15.0

# The most failed claims to withdraw.  Only the first ones in an outage may be written, when the connection broke.
MAX_FAILED = 1000

# An operation without a final answer stays until a person decides: a hundred years.
FOREVER = 100 * 365 * 86400.0

TOLD = "its caller was told that the outcome is unknown"

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Entry).decode


class LedgerKeyring:
    """Keys and requests in a ledger's store, shared by many machines.

    One record per key.  Its `request` is the entry to send; its lease tells which process sends it.  If that process dies, the
    lease lapses, and `adopt` lets another process send the same bytes under the same key.  A running record is `sending`, a held
    or released one is `open`.  A second caller of a key that is being sent, or has its answer, just sends: because of
    the key, there is one effect.

    Args:
        store: holds the records.
        lease: seconds.  It is renewed while the process lives.
        retention: seconds for which a settled key is remembered.
        own_store: the store was opened for this keyring alone, which then purges and closes it.
    """

    def __init__(
        self, store: Store, *, lease: float = LEASE, retention: float = RETENTION, own_store: bool = False
    ) -> None:
        if lease <= 0:
            raise ConfigurationError(
                f"lease={lease:g}s of the keyring: give more than 0 s, or a living process loses its operations"
            )
        self.store = store
        self.lease = lease
        self.retention = retention
        self._own_store = own_store
        self.heartbeat = Heartbeat(self._renew, SYSTEM)
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._sending: dict[int, Renewal] = {}  # the renewals of entries that are being sent, by token
        self._failed: dict[int, Entry] = {}  # entries whose claims failed but may have been written, by token
        self._withdraws_until = 0.0  # until this time, a renewal counts as withdrawing the failed claims

    def claim(self, entry: Entry, *, oldest: float) -> Plan[Entry]:
        found: Entry | Record | None = None
        with self._store_errors():
            if entry.token in self._sending:  # it was adopted, and its lease is ours
                found = yield from self.store.find(*operation_of(entry).id)
            while True:
                if found is None:
                    found = yield from self._store_request(entry, oldest)
                if isinstance(found, Entry):
                    return found
                check_reuse(replace(entry, fingerprint=found.fingerprint), entry)
                known = stored_entry(found) or entry
                known = replace(known, created_at=first_date(found, known))
                if not is_sendable(known, entry, oldest):
                    return known
                # The record may have another form of the same fingerprint, and only that form can claim it.
                entry = replace(
                    entry, created_at=known.created_at, fingerprint=found.fingerprint, state=state_in(found)
                )
                if found.state == "held":
                    yield from self._reopen(entry)
                elif not is_free(found):
                    return entry
                found = None

    def settle(self, entry: Entry, status: int) -> Plan[None]:
        lease = self._stop(entry)
        if lease is not None:
            final = encode(replace(entry, state="settled", status=status, body=None))
            with self._store_errors(), suppress(Fenced):  # another process has taken over
                yield from self.store.settle(lease, Outcome("value", status, body=final), retention=self.retention)

    def leave(self, entry: Entry) -> Plan[None]:
        lease = self._stop(entry)
        if lease is not None:
            with self._store_errors(), suppress(Fenced):
                yield from self.store.hold(lease, note=TOLD)

    def forget(self, entry: Entry) -> Plan[None]:
        lease = self._stop(entry)
        with self._store_errors(), suppress(Fenced):
            if lease is not None:
                yield from self.store.release(lease, retention=0.0)
                return
            record = yield from self.store.find(*operation_of(entry).id)
            stored = None if record is None else stored_entry(record)
            if stored is not None and stored.token == entry.token:  # otherwise a newer call has stored it again
                with suppress(Refusal):  # a process has begun to send it
                    yield from self.store.delete(*operation_of(entry).id)

    def pending(self) -> Plan[list[Entry]]:
        with self._store_errors():
            if self._own_store:
                yield from self.store.purge()
            found = []
            # A record that was reopened is released until it is claimed again.
            for where in ({"state": "running", "lapsed": True}, {"state": "held"}, {"state": "released"}):
                for record in (yield from self._list(Filter(name=NAME, **where))):
                    entry = yield from self._read(record)
                    if entry is not None:
                        found.append(entry)
        return sorted(found, key=lambda entry: entry.created_at)

    def adopt(self, entry: Entry) -> Plan[Entry | None]:
        with self._store_errors():
            if entry.state == "open":
                yield from self._reopen(entry)
            # Without a request, so that the stored one stays.
            lease = yield from self.store.claim(operation_of(entry), lease=self.lease)
            if isinstance(lease, Record):
                return None
            if lease.attempt == 1:  # the entry was forgotten meanwhile, and this is a new record
                with suppress(Fenced):
                    yield from self.store.release(lease, retention=0.0)
                return None
            adopted = replace(entry, token=secrets.randbits(62))
            yield from self._keep_alive(lease, adopted)
        return adopted

    def release(self, entry: Entry) -> Plan[None]:
        if entry.state == "open":
            yield from self.leave(entry)
        else:
            self._stop(entry)  # its lease lapses, as it had before

    def close(self) -> None:
        """End threads and connections.  The leases of operations that are being sent lapse."""
        self.heartbeat.close()
        if self._own_store:
            self.store.close()

    async def aclose(self) -> None:
        """Close the keyring, including its connections on the running event loop."""
        self.heartbeat.close()
        if self._own_store:
            await self.store.aclose()

    # Sending

    def _store_request(self, entry: Entry, oldest: float) -> Plan[Entry | Record]:
        """Claim the operation of *entry*, with *entry* as its request, and keep the lease alive while it is sent.

        Return the entry, the known one if it is too old, or the record that prevents the claim.
        """
        record: Record | None = None
        try:
            lease = yield from self.store.claim(operation_of(entry), lease=self.lease, request=encode(entry))
            if isinstance(lease, Record):
                return lease
            # Before anything else: if the caller is cancelled from here on, `leave` holds the record.
            yield from self._keep_alive(lease, entry)
            if self._failed:
                yield from self._withdraw_failed()
            if lease.attempt > 1:
                record = yield from self.store.find(*lease.operation.id)
        except StoreError:
            # The caller learns that nothing was sent, and may make a new key.  But the claim may have been written, so it
            # is withdrawn: otherwise another process would send the entry when the lease has lapsed.
            self._stop(entry)
            if len(self._failed) < MAX_FAILED:
                self._failed[entry.token] = replace(entry, headers=(), body=None)
            yield from self._withdraw_failed()
            raise
        if record is None:
            return entry
        # An earlier attempt was interrupted, and its date counts.
        known = replace(entry, created_at=first_date(record, entry))
        if is_sendable(known, entry, oldest):
            return known
        yield from self.leave(entry)
        return replace(known, token=0, state="open")

    def _keep_alive(self, lease: Lease, entry: Entry) -> Plan[None]:
        self._sending[entry.token] = renewal = Renewal(self.heartbeat, lease, self.lease)
        yield renewal

    def _stop(self, entry: Entry) -> Lease | None:
        """Stop renewing the lease of *entry*, and return it, or None if this process is not sending the entry."""
        renewal = self._sending.pop(entry.token, None)
        if renewal is None:
            return None
        renewal.stop()
        lease: Lease = renewal.lease
        return lease

    def _renew(self, renewal: Renewal) -> Plan[None]:
        """Renew the lease of an entry that is being sent.  If the renewal has no lease, withdraw the failed claims."""
        try:
            if renewal.lease is not None:
                yield from self.store.renew(renewal.lease, lease=renewal.seconds)
                return
            while self._failed:
                self._withdraws_until = SYSTEM.monotonic() + self.lease
                for entry in [*self._failed.values()]:
                    yield from self._withdraw(entry)
                    self._failed.pop(entry.token, None)
                # Before the last look at `_failed`, so that a claim that fails after it starts another renewal.
                self._withdraws_until = 0.0
            renewal.stop()
        except StoreError as error:
            renewal.due = 0.0
            log.info("A lease on the keyring could not be renewed; the next tick tries again: %s", error)
        except Fenced:
            renewal.lost = True

    def _withdraw_failed(self) -> Plan[None]:
        """Start a renewal that withdraws the failed claims, unless one has started within a lease."""
        if SYSTEM.monotonic() >= self._withdraws_until:
            self._withdraws_until = SYSTEM.monotonic() + self.lease
            yield Renewal(self.heartbeat, None, self.lease)

    def _withdraw(self, entry: Entry) -> Plan[None]:
        """Undo a claim that was written although the store said that it failed."""
        record = yield from self.store.find(*operation_of(entry).id)
        stored = stored_entry(record) if record is not None and record.state == "running" else None
        if record is None or stored is None or stored.token != entry.token:
            return
        lease = Lease(operation_of(stored), record.token, record.lease_until)
        with suppress(Fenced):
            if record.attempts == 1:
                yield from self.store.release(lease, retention=0.0)
            elif entry.state == "open":  # a caller knows of the earlier attempt.  Otherwise the record can be resumed
                yield from self.store.hold(lease, note=TOLD)

    # Pending operations

    def _list(self, where: Filter) -> Plan[list[Record]]:
        page = yield from self.store.list(where)
        found = list(page.records)
        while page.cursor is not None:
            page = yield from self.store.list(where, cursor=page.cursor)
            found.extend(page.records)
        return found

    def _read(self, record: Record) -> Plan[Entry | None]:
        """Return the entry of a listed record, or None if it has changed, or cannot be read (which is logged)."""
        try:
            found = yield from self.store.find(*record.id)  # because lists do not decrypt
            if found is None or (found.state, found.token) != (record.state, record.token):
                return None  # a process has begun to send it
            entry = stored_entry(found)
        except CorruptRecord as error:
            log.error("%s, key %s, cannot be resumed: %s", record.scope, record.key, error)
            return None
        if entry is None:
            return None
        return replace(entry, created_at=first_date(found, entry), state=state_in(found))

    def _reopen(self, entry: Entry) -> Plan[None]:
        """Make a held record claimable, unless another process was quicker."""
        with suppress(Refusal):
            yield from self.store.resolve(*operation_of(entry).id, None, retention=FOREVER, note="continued")

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Translate StoreError to KeyringError."""
        try:
            yield
        except StoreError as error:
            raise KeyringError(f"The keyring {self.store.url} failed: {error}") from error


class MemoryKeyring(LedgerKeyring):
    """Keys in memory, for tests and short-lived programs.

    It refuses a key that was used for another request, but nothing survives a crash.
    """

    def __init__(self, *, retention: float = RETENTION) -> None:
        super().__init__(connect("memory://"), lease=FOREVER, retention=retention, own_store=True)
        self._claims = 0

    def claim(self, entry: Entry, *, oldest: float) -> Plan[Entry]:
        self._claims += 1
        if self._claims % 1000 == 0:  # a long-lived process would otherwise keep expired keys
            yield from self.store.purge(batch=2000)
        return (yield from super().claim(entry, oldest=oldest))


def operation_of(entry: Entry) -> Operation:
    """Return the ledger's operation for the key of *entry*."""
    return Operation(f"{NAME} {entry.scope}", entry.key, entry.fingerprint, NAME)


def stored_entry(record: Record) -> Entry | None:
    """Return the entry in a record: its request or, once it is settled, its outcome."""
    data = record.outcome.body if record.state == "settled" and record.outcome else record.request
    if not data:
        return None
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(
            f"The request under key {record.key!r} cannot be read: if it is encrypted, give the keyring a guard with its seal"
        ) from error


def state_in(record: Record) -> State:
    """Return the state of the entry in a record."""
    return "sending" if record.state == "running" else "settled" if record.state == "settled" else "open"


def first_date(record: Record, entry: Entry) -> float:
    """Return the time of the first claim.  A claim after a crash replaces the entry, but not the record's own date.

    A date in the future is not changed: the clock was set back, so the operation's age is not known.
    """
    now = time.time()
    if entry.created_at > now + CLOCK_TOLERANCE:
        return entry.created_at
    return min(entry.created_at, now - (record.now - record.created_at))
