"""A store that encrypts outcomes and requests before they are written, and decrypts them when they are read."""

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
    """Encrypts and decrypts outcomes: see `oncemore.encryption`.

    The *id* (scope and key) is authenticated too: an outcome that was moved to another record cannot be opened.
    """

    def seal(self, id: Id, outcome: Outcome) -> Outcome: ...
    def open(self, id: Id, outcome: Outcome) -> Outcome: ...


class Wrapper:
    """Forwards everything that a subclass does not define to *inner*."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class StoreWrapper(Wrapper):
    """A store that forwards to the *inner* one."""

    inner: Store

    # __getattr__ does not see assignments, and an assignment must reach the inner store, because its clock is shifted.

    @property
    def shift(self) -> float:
        return self.inner.shift

    @shift.setter
    def shift(self, seconds: float) -> None:
        self.inner.shift = seconds


class Sealed(Wrapper):
    """The verbs that a store and a transaction share; *inner* gets outcomes and requests sealed."""

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
    """A store that seals every outcome and request in the *inner* store.

    `list` leaves them sealed: `find` a record to read it.
    """

    def __init__(self, inner: Store, seal: Sealing) -> None:
        super().__init__(inner, seal)
        if not hasattr(seal, "seal"):  # it would fail only after the effect; it may be a key, so do not show it
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
    """Opens transactions that seal every outcome and request."""

    def open(self) -> Plan[Transaction]:
        transaction = yield from self.inner.open()
        return cast("Transaction", SealedTransaction(transaction, self._seal))


class SealedTransaction(Sealed):
    """A transaction that seals every outcome and request in the *inner* transaction."""

    def begin(self, operation: Operation, *, lease: float, wait: float, request: bytes = b"") -> Plan[Lease | Record]:
        sealed = seal_request(self._seal, operation.id, request)
        found = yield from self.inner.begin(operation, lease=lease, wait=wait, request=sealed)
        return found if isinstance(found, Lease) else opened(self._seal, found)


def opened(seal: Sealing, record: Record) -> Record:
    """Return the record with its outcome and its request opened."""
    if record.request:
        record = msgspec.structs.replace(record, request=open_request(seal, record.id, record.request))
    if record.outcome is None:
        return record
    return msgspec.structs.replace(record, outcome=seal.open(record.id, record.outcome))


def seal_request(seal: Sealing, id: Id, request: bytes) -> bytes:
    """Return the request sealed like an outcome, but under an id that no outcome has, so that neither opens as the other."""
    scope, key = id
    return encode_outcome(seal.seal((f"request|{scope}", key), Outcome("value", body=request))) if request else b""


def open_request(seal: Sealing, id: Id, sealed: bytes) -> bytes:
    scope, key = id
    try:
        outcome = decode_outcome(sealed)
    except msgspec.MsgspecError:  # stored before there was a seal, or tampered with: the seal decides
        outcome = Outcome("value", body=sealed)
    return seal.open((f"request|{scope}", key), outcome).body
