"""Endpoints: the addresses that customers have registered for webhooks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Literal, get_args

import msgspec

from .._contract.policy import duration
from .._ledger.encrypted import Sealing
from .._ledger.guard import check_positive
from .._ledger.model import Outcome, decode_outcome, encode_outcome
from .._ledger.tables import Sql, Tables
from .._ledger.transactions import Query
from .._runtime.plan import Plan, arun, run
from ..errors import ConfigurationError, NotFound
from ..messages.inbox import matches
from . import statements as sql
from .signature import new_key_pair, new_secret, public_key, read_key
from .targets import Targets

Ordering = Literal["none", "subject", "fifo"]
SignatureVersion = Literal["v1", "v1a"]
State = Literal["enabled", "disabled"]

ORDERINGS, SIGNATURES, STATES = map(get_args, (Ordering, SignatureVersion, State))
RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)/(s|m|h)")
PER = {"s": 1.0, "m": 60.0, "h": 3600.0}
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
# Headers that the sender or HTTP itself sets.
OWN_HEADERS = {"host", "content-length", "content-type", "transfer-encoding", "connection", "te", "trailer", "upgrade"}
PLAIN = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]*")  # no control characters, and nothing that UTF-8 cannot encode
DAY = 86400.0
SLICE = 1000  # the most deliveries that are parked or deleted in one transaction
SECRETS, PACED_UNTIL = 13, 14  # places in ENDPOINT_COLUMNS
MOST_KNOWN = 10_000  # the most endpoints with secrets in memory

encode, decode = msgspec.json.encode, msgspec.json.decode


class Secret(msgspec.Struct, frozen=True):
    """A secret of an endpoint; with *until*, it signs only before that time, in seconds since 1970."""

    text: str
    until: float | None = None

    def __repr__(self) -> str:
        return f"Secret(until={self.until!r})"


decode_secrets = msgspec.json.Decoder(list[Secret]).decode


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An address that gets webhooks.

    Only the results of `create` and `rotate` have a *secret*.  *public_key* is for receivers, if the signature is v1a.
    *failing_since* is the time of the first failure since the latest success, in seconds since 1970.
    """

    id: str
    url: str
    tenant: str
    events: tuple[str, ...]
    headers: dict[str, str]
    signature: SignatureVersion
    order: Ordering
    rate: float | None
    description: str
    state: State
    reason: str
    created_at: float
    failing_since: float | None
    public_key: str | None = None
    secret: str | None = None

    def wants(self, type: str) -> bool:
        """Whether the endpoint gets events of this type."""
        return any(matches(pattern, type) for pattern in self.events)

    def __repr__(self) -> str:
        return f"Endpoint(id={self.id!r}, url={self.url!r}, tenant={self.tenant!r}, state={self.state!r})"


class Registered(msgspec.Struct):
    """An endpoint with its secrets, as the sender needs it."""

    endpoint: Endpoint
    secrets: Sequence[Secret]
    paced_until: float | None

    def signing(self, now: float) -> list[str]:
        """Return the secrets that sign at the time *now*."""
        return [secret.text for secret in self.secrets if secret.until is None or secret.until > now]


class Endpoints:
    """The endpoints of all tenants.  Each method has an awaited form: `acreate` for `create`."""

    def __init__(self, tables: Tables, targets: Targets, seal: Sealing | None) -> None:
        self._tables = tables
        self._targets = targets
        self._seal = seal
        # Opened secrets by endpoint and sealed form, because opening them costs time.
        self._secrets: dict[tuple[str, bytes], Sequence[Secret]] = {}

    def create(
        self,
        url: str,
        *,
        tenant: str = "",
        events: Sequence[str] = ("*",),
        headers: Mapping[str, str] | None = None,
        rate: str | None = None,
        order: Ordering = "none",
        signature: SignatureVersion = "v1",
        secret: str | None = None,
        description: str = "",
        disabled: bool = False,
        id: str | None = None,
    ) -> Endpoint:
        """Register an address.

        Args:
            url: The address; HTTPS, unless `Webhooks(allow_http=True)`.
            tenant: The customer that owns it.  It gets only this customer's events.
            events: The types of events that it gets.  `*` matches any characters, as in `refund.*`.
            headers: Headers to add to each of its webhooks.
            rate: The most webhooks that it gets in a time, such as `"5/s"` or `"100/m"`.
            order: `"fifo"`: one at a time, in the order of sending; `"subject"`: in order for each subject.
            signature: `"v1"` (a shared secret) or `"v1a"` (Ed25519: give the receiver `endpoint.public_key`).
            secret: Its secret, if it has one already; otherwise a new one is made.  Only the result shows it.
            description: A note for people.
            disabled: Whether it is disabled at first.  Its events are then parked until `recover`.
            id: Its id; by default a random one.  A repeated call with the same id and secret changes nothing.
        """
        return run(
            self._create(url, tenant, events, headers, rate, order, signature, secret, description, disabled, id)
        )

    async def acreate(
        self,
        url: str,
        *,
        tenant: str = "",
        events: Sequence[str] = ("*",),
        headers: Mapping[str, str] | None = None,
        rate: str | None = None,
        order: Ordering = "none",
        signature: SignatureVersion = "v1",
        secret: str | None = None,
        description: str = "",
        disabled: bool = False,
        id: str | None = None,
    ) -> Endpoint:
        """Register an address, as `create` does."""
        return await arun(
            self._create(url, tenant, events, headers, rate, order, signature, secret, description, disabled, id)
        )

    def _create(
        self,
        url: str,
        tenant: str,
        events: Sequence[str],
        headers: Mapping[str, str] | None,
        rate: str | None,
        order: Ordering,
        signature: SignatureVersion,
        secret: str | None,
        description: str,
        disabled: bool,
        id: str | None,
    ) -> Plan[Endpoint]:
        if signature not in SIGNATURES:
            raise ConfigurationError(f"signature = {signature!r}: write 'v1' or 'v1a'")
        secret = secret or (new_secret() if signature == "v1" else new_key_pair()[0])
        check_secret(secret, signature)
        id = id or f"ep_{token_hex(12)}"
        state: State = "disabled" if disabled else "enabled"
        values = [
            check_text("id", id),
            check_text("tenant", tenant, empty=True),
            self._check_url(url),
            encode(check_events(events)).decode(),
            encode(check_headers(headers or {})).decode(),
            self._seal_secrets(id, [Secret(secret)]),
            signature,
            check_order(order),
            read_rate(rate),
            check_description(description),
            state,
            "created disabled" if disabled else "",
        ]
        yield from self._tables.execute(self._tables.query(sql.CREATE_ENDPOINT, *values))
        found = self.read((yield from self._find(id)))
        if found.secrets[0].text != secret:
            raise ConfigurationError(f"The endpoint {id!r} exists already: update or rotate it, or choose another id")
        return msgspec.structs.replace(found.endpoint, secret=secret)

    def get(self, id: str) -> Endpoint:
        """Return the endpoint, or raise NotFound."""
        return run(self._get(id))

    async def aget(self, id: str) -> Endpoint:
        """Return the endpoint, or raise NotFound."""
        return await arun(self._get(id))

    def _get(self, id: str) -> Plan[Endpoint]:
        return self.describe((yield from self._find(id)))

    def _find(self, id: str) -> Plan[Sequence[Any]]:
        """Return the row of the endpoint, or raise NotFound."""
        (rows,) = yield from self._tables.execute(self._tables.query(sql.FIND_ENDPOINT, id))
        if not rows:
            raise NotFound(f"There is no endpoint {id!r}")
        return rows[0]

    def list(
        self, *, tenant: str | None = None, state: State | None = None, limit: int = 100, after: str = ""
    ) -> Sequence[Endpoint]:
        """Return up to *limit* endpoints, of all tenants or one, by their ids; the next page begins *after* an id."""
        return run(self._list(tenant, state, limit, after))

    async def alist(
        self, *, tenant: str | None = None, state: State | None = None, limit: int = 100, after: str = ""
    ) -> Sequence[Endpoint]:
        """Return a page of endpoints, as `list` does."""
        return await arun(self._list(tenant, state, limit, after))

    def _list(self, tenant: str | None, state: State | None, limit: int, after: str) -> Plan[Sequence[Endpoint]]:
        if state is not None and state not in STATES:
            raise ConfigurationError(f"state = {state!r}: write one of {', '.join(map(repr, STATES))}")
        query = self._tables.query(sql.LIST_ENDPOINTS, after, tenant, state, check_positive("limit", limit))
        (rows,) = yield from self._tables.execute(query)
        return [self.describe(row) for row in rows]

    def update(self, id: str, **changes: Any) -> Endpoint:
        """Change the *url*, *events*, *headers*, *rate*, *order* or *description* of an endpoint."""
        return run(self._update(id, changes))

    async def aupdate(self, id: str, **changes: Any) -> Endpoint:
        """Change an endpoint, as `update` does."""
        return await arun(self._update(id, changes))

    def _update(self, id: str, changes: dict[str, Any]) -> Plan[Endpoint]:
        known = ("url", "events", "headers", "rate", "order", "description")
        for name in changes.keys() - set(known):
            raise ConfigurationError(f"An endpoint's {name} cannot be changed by update, only {', '.join(known)}")

        def changed(found: Registered, now: float) -> Sequence[Any]:
            old = found.endpoint
            return [
                self._check_url(changes.get("url", old.url)),
                encode(check_events(changes.get("events", old.events))).decode(),
                encode(check_headers(changes.get("headers", old.headers))).decode(),
                check_order(changes.get("order", old.order)),
                read_rate(changes["rate"]) if "rate" in changes else old.rate,
                check_description(changes.get("description", old.description)),
            ]

        yield from self._change(id, sql.UPDATE_ENDPOINT, changed)
        return (yield from self._get(id))

    def _change(self, id: str, statement: Sql, change: Callable[[Registered, float], Sequence[Any]]) -> Plan[None]:
        """Lock the endpoint, and run *statement* with the values that *change* makes of the endpoint and the time."""
        tables = self._tables
        transaction = yield from tables.open()
        try:
            rows = yield from transaction.begin(tables.query(sql.LOCK_ENDPOINT, id))
            if not rows:
                raise NotFound(f"There is no endpoint {id!r}")
            values = change(self.read(rows[0]), rows[0][-1])
            yield from transaction.commit(tables.query(statement, id, *values))
        except BaseException:
            yield from transaction.rollback()
            raise

    def rotate(self, id: str, *, grace: float | str = DAY, secret: str | None = None) -> Endpoint:
        """Give the endpoint a new secret, which the result shows.  During *grace*, the old one signs as well."""
        return run(self._rotate(id, grace, secret))

    async def arotate(self, id: str, *, grace: float | str = DAY, secret: str | None = None) -> Endpoint:
        """Give the endpoint a new secret, as `rotate` does."""
        return await arun(self._rotate(id, grace, secret))

    def _rotate(self, id: str, grace: float | str, secret: str | None) -> Plan[Endpoint]:
        seconds = duration(grace)
        new = ""

        def rotated(found: Registered, now: float) -> Sequence[Any]:
            nonlocal new
            signature, ends = found.endpoint.signature, now + seconds
            new = secret or (new_secret() if signature == "v1" else new_key_pair()[0])
            check_secret(new, signature)
            old = [Secret(each.text, min(ends, each.until or ends)) for each in found.secrets]
            valid = [each for each in old if each.until > now]  # type: ignore[operator]
            return [self._seal_secrets(id, [Secret(new), *valid])]

        yield from self._change(id, sql.SET_SECRETS, rotated)
        return msgspec.structs.replace((yield from self._get(id)), secret=new)

    def disable(self, id: str, *, reason: str = "disabled by hand") -> Endpoint:
        """Disable the endpoint: its deliveries, also of new events, are parked until `recover`.

        A request under way is finished, and `ping` and `resend` still send to the endpoint.
        """
        return run(self._disable(id, reason))

    async def adisable(self, id: str, *, reason: str = "disabled by hand") -> Endpoint:
        """Disable the endpoint, as `disable` does."""
        return await arun(self._disable(id, reason))

    def _disable(self, id: str, reason: str) -> Plan[Endpoint]:
        yield from self.disable_now(id, reason)
        yield from self.park(id)
        return (yield from self._get(id))

    def disable_now(self, id: str, reason: str, *also: Query) -> Plan[bool]:
        """Disable the endpoint and run *also* in one transaction.  Return False, and run nothing, if it was disabled.

        Senders claim nothing more for it, except deliveries resent by hand.  Pending ones have yet to be parked.
        """
        transaction = yield from self._tables.open()
        try:
            query = self._tables.query(sql.SET_STATE, id, "disabled", reason[:500])
            changed = yield from transaction.begin(query)
            yield from transaction.commit(*(also if changed else ()))
        except BaseException:
            yield from transaction.rollback()
            raise
        return bool(changed)

    def park(self, id: str) -> Plan[None]:
        """Park the pending deliveries of a disabled endpoint."""
        while (yield from self.park_slice(id)):
            pass

    def park_slice(self, id: str) -> Plan[int]:
        """Park a slice of the pending deliveries of a disabled endpoint; return how many."""
        (rows,) = yield from self._tables.execute(self._tables.query(sql.PARK, id, SLICE))
        return len(rows)

    def park_strays(self) -> Plan[int]:
        """Park a slice of the pending deliveries of each disabled endpoint; return how many.

        A sender that disables an endpoint parks only the first slice.  A process may die before it has parked any.
        A sender that has read the former state may add some.
        """
        (rows,) = yield from self._tables.execute(self._tables.query(sql.DISABLED_WITH_PENDING))
        count = 0
        for (id,) in rows:
            count += yield from self.park_slice(id)
        return count

    def enable(self, id: str) -> Endpoint:
        """Send new events to the endpoint again.  `recover(only="missing")` sends those that were parked meanwhile."""
        return run(self._enable(id))

    async def aenable(self, id: str) -> Endpoint:
        """Send new events to the endpoint again, as `enable` does."""
        return await arun(self._enable(id))

    def _enable(self, id: str) -> Plan[Endpoint]:
        if (yield from self._get(id)).state == "disabled":
            yield from self.park(id)
        yield from self._tables.execute(self._tables.query(sql.SET_STATE, id, "enabled", ""))
        return (yield from self._get(id))

    def delete(self, id: str) -> bool:
        """Remove the endpoint with its deliveries and attempts; return False if there was none."""
        return run(self._delete(id))

    async def adelete(self, id: str) -> bool:
        """Remove the endpoint, as `delete` does."""
        return await arun(self._delete(id))

    def _delete(self, id: str) -> Plan[bool]:
        (rows,) = yield from self._tables.execute(self._tables.query(sql.DELETE_ENDPOINT, id))
        while True:
            (found,) = yield from self._tables.execute(self._tables.query(sql.DELIVERIES_OF, id, SLICE))
            if not found:
                return bool(rows)
            gone = encode([{"seq": seq} for (seq,) in found]).decode()
            yield from self._tables.execute(*(self._tables.query(each, gone) for each in sql.DELETE_DELIVERIES))

    def _check_url(self, url: str) -> str:
        self._targets.check_url(url)
        return url

    # Rows

    def read(self, row: Sequence[Any]) -> Registered:
        """Return the endpoint in a row of ENDPOINT_COLUMNS, with its secrets."""
        return Registered(self.describe(row), self._open_secrets(row[0], bytes(row[SECRETS])), row[PACED_UNTIL])

    def describe(self, row: Sequence[Any]) -> Endpoint:
        """Return the endpoint in a row of ENDPOINT_COLUMNS.  Secrets are opened only to find the public key of v1a."""
        found = dict(zip(Endpoint.__struct_fields__, row[:SECRETS], strict=False))
        found["events"], found["headers"] = tuple(decode(found["events"])), decode(found["headers"])
        if found["signature"] == "v1a":
            found["public_key"] = public_key(self._open_secrets(row[0], bytes(row[SECRETS]))[0].text)
        return Endpoint(**found)

    def _seal_secrets(self, id: str, secrets: Sequence[Secret]) -> bytes:
        outcome = Outcome("value", body=encode(list(secrets)))
        return encode_outcome(outcome if self._seal is None else self._seal.seal(("webhook endpoint", id), outcome))

    def _open_secrets(self, id: str, sealed: bytes) -> Sequence[Secret]:
        secrets = self._secrets.get((id, sealed))
        if secrets is None:
            outcome = decode_outcome(sealed)
            if self._seal is not None:
                outcome = self._seal.open(("webhook endpoint", id), outcome)
            elif outcome.headers:
                raise ConfigurationError(
                    "The secrets of the endpoints are encrypted: give Webhooks(seal=...) the same Seal"
                )
            if len(self._secrets) >= MOST_KNOWN:
                self._secrets.clear()
            secrets = self._secrets[id, sealed] = decode_secrets(outcome.body)
        return secrets


def check_secret(secret: str, signature: str) -> None:
    read_key(secret)
    if secret.startswith("whpk_") or secret.startswith("whsk_") != (signature == "v1a"):
        raise ConfigurationError(
            f"A secret of {signature} must begin with {'whsec_' if signature == 'v1' else 'whsk_'}"
        )


def check_text(name: str, text: object, *, empty: bool = False) -> str:
    if not isinstance(text, str) or len(text) > 256 or (not text and not empty) or not PLAIN.fullmatch(text):
        raise ConfigurationError(f"{name} = {text!r}: write {int(not empty)} to 256 characters, no control characters")
    return text


def check_description(text: object) -> str:
    if not isinstance(text, str) or not PLAIN.fullmatch(text.replace("\n", " ")):
        raise ConfigurationError(f"description = {text!r}: write a text without control characters")
    return text


def check_events(events: object) -> list[str]:
    if isinstance(events, str) or not isinstance(events, Sequence) or not events:
        raise ConfigurationError(f"events = {events!r}: write a list of types, as in ['refund.*']")
    return [check_text("events", each) for each in events]


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise ConfigurationError(f"headers = {headers!r}: write a dictionary, as in {{'X-Shop': '7'}}")
    for name, value in headers.items():
        if not all(isinstance(each, str) for each in (name, value)) or not (
            HEADER_NAME.fullmatch(name) and HEADER_VALUE.fullmatch(value)
        ):
            raise ConfigurationError(f"{name!r}: {value!r} is not a header: write plain ASCII, without line breaks")
        if name.lower() in OWN_HEADERS or name.lower().startswith("webhook-"):
            raise ConfigurationError(f"The header {name!r} is set by the sender: remove it from headers")
    return dict(headers)


def check_order(order: object) -> str:
    if order not in ORDERINGS:
        raise ConfigurationError(f"order = {order!r}: write one of {', '.join(map(repr, ORDERINGS))}")
    return str(order)


def read_rate(rate: str | float | None) -> float | None:
    """Return the deliveries per second that a text such as `"5/s"` allows, or None for no limit."""
    if rate is None:
        return None
    found = RATE.fullmatch(rate) if isinstance(rate, str) else None
    if found is None or not float(found[1]):
        raise ConfigurationError(f"rate = {rate!r}: write deliveries in a time, such as '5/s', '100/m' or '1000/h'")
    return float(found[1]) / PER[found[2]]
