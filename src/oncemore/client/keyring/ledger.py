"""The keyring in a ledger: any store keeps keys and requests, for many machines, and a lease tells which process sends."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
from msgspec.structs import replace

from ..._ledger.decisions import is_over
from ..._ledger.model import Lease, Operation, Outcome, Record
from ..._ledger.store import Filter, Store
from ..._runtime.clock import SYSTEM
from ..._runtime.forks import reset_in_child
from ..._runtime.heartbeat import Heartbeat, Renewal
from ..._runtime.plan import Plan
from ...errors import ConfigurationError, CorruptRecord, Fenced, Refusal, StoreError
from ..errors import KeyringError
from ..story import log
from .entry import CLOCK_TOLERANCE, RETENTION, Entry, check_reuse, is_sendable

# The name of our operations in the ledger, and the beginning of their scopes.
NAME = "oncemore.keyring"

# After its process died, an operation can be resumed when so many seconds have passed.
LEASE = 15.0

# In a long failure of the store, only the last claims can have been written.
MAX_FAILED = 1000

# An operation without a final answer stays until a person decides: a hundred years.
FOREVER = 100 * 365 * 86400.0

TOLD = "its caller was told that the outcome is unknown"
TOO_OLD = "the server may have forgotten the key"

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Entry).decode


class LedgerKeyring:
    """Keys and requests in a ledger's store, shared by many machines.

    One record per key.  Its `request` is the entry to send; its lease tells which process sends it.  If that process dies, the
    lease lapses, and `adopt` lets another process send the same bytes under the same key.  A running record is `sending`, a held
    or released one is `open`.  A second sender of a key that is being sent, or has its answer, just sends: the key keeps that to
    one effect.

    Args:
        store: holds the records.
        lease: seconds; renewed while the process lives.
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
        self._sending: dict[int, Renewal] = {}  # by the token of the entry
        self._failed: deque[Entry] = deque(maxlen=MAX_FAILED)  # their claims failed, but may have been written

    def claim(self, entry: Entry, *, oldest: float) -> Plan[Entry]:
        found: Lease | Record | None = None
        with self._store_errors():
            if entry.token in self._sending:  # it was adopted, and its lease is ours
                found = yield from self.store.find(*operation_of(entry).id)
            while True:
                if found is None:
                    found = yield from self._store_request(entry)
                if isinstance(found, Lease):
                    return (yield from self._begin(found, entry, oldest))
                check_reuse(replace(entry, fingerprint=found.fingerprint), entry)
                known = stored_entry(found) or entry
                known = replace(known, created_at=first_date(found, known))
                if not is_sendable(known, entry, oldest):
                    return known
                # The record may have another form of the same fingerprint, and only that form can claim it.
                entry = replace(entry, created_at=known.created_at, fingerprint=found.fingerprint)
                if found.state == "held":
                    yield from self._reopen(entry)
                elif not is_over(found):
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
            # A record is released between being reopened and being claimed again.
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
        """End threads and connections; the leases of operations that are being sent lapse."""
        self.heartbeat.close()
        if self._own_store:
            self.store.close()

    async def aclose(self) -> None:
        """Close the keyring, including its connections on the running event loop."""
        self.heartbeat.close()
        if self._own_store:
            await self.store.aclose()

    # Sending

    def _store_request(self, entry: Entry) -> Plan[Lease | Record]:
        """Claim the operation of *entry*, with *entry* as its request."""
        try:
            return (yield from self.store.claim(operation_of(entry), lease=self.lease, request=encode(entry)))
        except StoreError:
            # The caller is told that nothing was sent, and may make a new key.  But the claim may have been written: it must
            # be withdrawn, or another process would send it once its lease has lapsed.
            self._failed.append(replace(entry, headers=(), body=None))
            if len(self._failed) == 1:
                yield Renewal(self.heartbeat, None, self.lease)
            raise

    def _begin(self, lease: Lease, entry: Entry, oldest: float) -> Plan[Entry]:
        """Keep the lease alive while the entry is sent; or return the known entry, if it is too old."""
        if lease.attempt > 1:  # an earlier attempt was interrupted: its date counts
            record = yield from self.store.find(*lease.operation.id)
            known = entry if record is None else replace(entry, created_at=first_date(record, entry))
            if not is_sendable(known, entry, oldest):
                with suppress(Fenced):
                    yield from self.store.hold(lease, note=TOO_OLD)
                return replace(known, token=0, state="open")
            entry = known
        yield from self._keep_alive(lease, entry)
        return entry

    def _keep_alive(self, lease: Lease, entry: Entry) -> Plan[None]:
        self._sending[entry.token] = renewal = Renewal(self.heartbeat, lease, self.lease)
        yield renewal

    def _stop(self, entry: Entry) -> Lease | None:
        """Return the lease of an entry that is being sent by this process, and renew it no more."""
        renewal = self._sending.pop(entry.token, None)
        if renewal is None:
            return None
        renewal.stop()
        lease: Lease = renewal.lease
        return lease

    def _renew(self, renewal: Renewal) -> Plan[None]:
        """Renew the lease of an entry that is being sent; if it is None, withdraw the failed claims."""
        try:
            if renewal.lease is not None:
                yield from self.store.renew(renewal.lease, lease=renewal.seconds)
                return
            while self._failed:
                yield from self._withdraw(entry := self._failed[0])
                with suppress(ValueError):  # a failure since may have pushed it out
                    self._failed.remove(entry)
            renewal.stop()
        except StoreError as error:
            renewal.due = 0.0
            log.info("A lease on the keyring could not be renewed; the next tick tries again: %s", error)
        except Fenced:
            renewal.lost = True

    def _withdraw(self, entry: Entry) -> Plan[None]:
        """Remove the record of a claim that was written although the store said that it failed."""
        record = yield from self.store.find(*operation_of(entry).id)
        if record is None or record.state != "running" or record.attempts > 1:  # an earlier attempt stays pending
            return
        stored = stored_entry(record)
        if stored is not None and stored.token == entry.token:
            with suppress(Fenced):
                yield from self.store.release(
                    Lease(operation_of(stored), record.token, record.lease_until), retention=0.0
                )

    # Pending operations

    def _list(self, where: Filter) -> Plan[list[Record]]:
        page = yield from self.store.list(where)
        found = list(page.records)
        while page.cursor is not None:
            page = yield from self.store.list(where, cursor=page.cursor)
            found.extend(page.records)
        return found

    def _read(self, record: Record) -> Plan[Entry | None]:
        """Return the entry of a listed record; one that cannot be read is logged, and does not affect the others."""
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
        return replace(
            entry, created_at=first_date(found, entry), state="sending" if found.state == "running" else "open"
        )

    def _reopen(self, entry: Entry) -> Plan[None]:
        """Make a held record claimable, unless another process was quicker."""
        with suppress(Refusal):
            yield from self.store.resolve(*operation_of(entry).id, None, retention=FOREVER, note="continued")

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Translate errors of the store."""
        try:
            yield
        except StoreError as error:
            raise KeyringError(f"The keyring {self.store.url} failed: {error}") from error


def operation_of(entry: Entry) -> Operation:
    """Return the operation in the ledger that stands for the entry's key."""
    return Operation(f"{NAME} {entry.scope}", entry.key, entry.fingerprint, NAME)


def stored_entry(record: Record) -> Entry | None:
    """Return the entry in a record: its request or, once it is settled, its outcome."""
    data = record.outcome.body if record.state == "settled" and record.outcome else record.request
    if not data:
        return None
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(f"The request under key {record.key!r} cannot be read; was it encrypted?") from error


def first_date(record: Record, entry: Entry) -> float:
    """Return when the operation was first stored: a claim after a crash replaces the entry, but not the record's own date.

    A date in the future stays as it is: the clock was set back, so the operation's age is not known.
    """
    now = time.time()
    if entry.created_at > now + CLOCK_TOLERANCE:
        return entry.created_at
    return min(entry.created_at, now - (record.now - record.created_at))
