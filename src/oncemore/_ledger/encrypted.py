"""A store that seals outcomes and requests before they are written, and opens them when they are read."""

from __future__ import annotations

from typing import Any, Protocol, cast

import msgspec

from .._runtime.plan import Plan
from .._runtime.wakeups import Id
from ..errors import ConfigurationError
from .model import Lease, Operation, Outcome, Record, decode_outcome, encode_outcome
from .store import Store
from .transactions import Transaction, TransactionSource


class Sealing(Protocol):
    """Makes an outcome unreadable without the key, even with access to the store: see `oncemore.encryption`.

    The *id* (scope and key) is part of the seal: an outcome that was moved to another record does not open.
    """

    def seal(self, id: Id, outcome: Outcome) -> Outcome: ...
    def open(self, id: Id, outcome: Outcome) -> Outcome: ...


class Wrapper:
    """A thing around another one: what a subclass does not define, *inner* does."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class StoreWrapper(Wrapper):
    """A store around another one."""

    inner: Store

    # Defined here because __getattr__ does not see assignments: the inner store's clock must be shifted, not this one's.

    @property
    def shift(self) -> float:
        return self.inner.shift

    @shift.setter
    def shift(self, seconds: float) -> None:
        self.inner.shift = seconds


class Sealed(Wrapper):
    """The verbs that a store and a transaction share, with outcomes and requests sealed in *inner*."""

    def __init__(self, inner: Any, seal: Sealing) -> None:
        super().__init__(inner)
        self._seal = seal

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]:
        sealed = seal_request(self._seal, operation.id, request)
        found = yield from self.inner.claim(operation, lease=lease, request=sealed)
        return found if isinstance(found, Lease) else opened(self._seal, found)

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        sealed = self._seal.seal(held.operation.id, outcome)
        return cast("Plan[None]", self.inner.settle(held, sealed, retention=retention, audit=audit, note=note))

    def find(self, scope: str, key: str) -> Plan[Record | None]:
        found = yield from self.inner.find(scope, key)
        return None if found is None else opened(self._seal, found)


class SealedStore(Sealed, StoreWrapper):
    """The *inner* store, with every outcome and request sealed in it.

    Pages of many records are left sealed: look one up to read it.
    """

    def __init__(self, inner: Store, seal: Sealing) -> None:
        super().__init__(inner, seal)
        if not hasattr(seal, "seal"):  # it could only fail after the effect; and it may be a key, so it is not shown
            raise ConfigurationError(f"seal is a {type(seal).__name__}: write Seal(key), from oncemore.encryption")

    def resolve(
        self, scope: str, key: str, outcome: Outcome | None, *, retention: float, note: str = ""
    ) -> Plan[Record]:
        sealed = None if outcome is None else self._seal.seal((scope, key), outcome)
        found = yield from self.inner.resolve(scope, key, sealed, retention=retention, note=note)
        return opened(self._seal, found)

    @property
    def lender(self) -> TransactionSource | None:
        inner = self.inner.lender
        return None if inner is None else cast("TransactionSource", SealedSource(inner, self._seal))


class SealedSource(Sealed):
    """A source of transactions that seal outcomes too."""

    def open(self) -> Plan[Transaction]:
        transaction = yield from self.inner.open()
        return cast("Transaction", SealedTransaction(transaction, self._seal))


class SealedTransaction(Sealed):
    """The *inner* transaction, with every outcome and request sealed in it."""

    def begin(self, operation: Operation, *, lease: float, wait: float, request: bytes = b"") -> Plan[Lease | Record]:
        sealed = seal_request(self._seal, operation.id, request)
        found = yield from self.inner.begin(operation, lease=lease, wait=wait, request=sealed)
        return found if isinstance(found, Lease) else opened(self._seal, found)


def opened(seal: Sealing, record: Record) -> Record:
    """The record with its outcome and its request as they were before they were sealed."""
    if record.request:
        record = msgspec.structs.replace(record, request=open_request(seal, record.id, record.request))
    if record.outcome is None:
        return record
    return msgspec.structs.replace(record, outcome=seal.open(record.id, record.outcome))


def seal_request(seal: Sealing, id: Id, request: bytes) -> bytes:
    """The request as it may lie in a store: sealed like an outcome, under a name that no outcome is sealed under."""
    scope, key = id
    return encode_outcome(seal.seal((f"request|{scope}", key), Outcome("value", body=request))) if request else b""


def open_request(seal: Sealing, id: Id, sealed: bytes) -> bytes:
    scope, key = id
    try:
        outcome = decode_outcome(sealed)
    except msgspec.MsgspecError:  # stored before there was a seal, or changed: the seal decides
        outcome = Outcome("value", body=sealed)
    return seal.open((f"request|{scope}", key), outcome).body
