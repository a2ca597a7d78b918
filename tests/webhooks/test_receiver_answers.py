"""A receiver's rarer answers, its settings and its events, and hostile headers, which it refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore import Guard, Inbox, Op
from oncemore._ledger.events import Event
from oncemore._ledger.values import replayed
from oncemore._runtime.plan import run
from oncemore.errors import ConfigurationError, StoreUnavailable, UnknownOutcome, WrongState
from oncemore.messages.envelope import Envelope, parse_structured
from oncemore.testing.crashes import SECRET as INTERNAL
from oncemore.testing.crashes import FaultyStore
from oncemore.webhooks import Receiver
from oncemore.webhooks.schemes import Description, Pairs, Scheme

from .senders import SECRET, SENDERS, Headers, Sender

STRIPE = SENDERS["stripe"]


class Answer(NamedTuple):
    status: int
    headers: Headers
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def deliver(receiver: Receiver, headers: Any, body: bytes, method: str = "POST") -> Answer:
    """Call the ASGI app as a server does."""
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = headers.items() if isinstance(headers, dict) else headers
    raw = [(latin(name).lower(), latin(value)) for name, value in pairs]
    await receiver({"type": "http", "method": method, "path": "/", "headers": raw}, receive, send)
    start, end = sent
    named = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], named, end["body"])


def latin(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("latin-1", "replace")


def receiver_for(sender: Sender = STRIPE, handler: Any = None, *, guard: Guard | None = None, **more: Any) -> Receiver:
    inbox = Inbox(guard or Guard("memory://"), effect="lease", **more)
    return Receiver(inbox, sender.scheme, secrets=[SECRET], handler=handler or ignore, **sender.options)


def ignore(op: Op, event: Envelope) -> None:
    pass


async def test_handler_gets_the_operation_and_the_envelope() -> None:
    seen: list[tuple[Op, Envelope]] = []

    async def handler(op: Op, event: Envelope) -> None:
        seen.append((op, event))

    body = STRIPE.body("ev_1", created=1_700_000_000)
    headers = {**STRIPE.headers(body), "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    assert (await deliver(receiver_for(handler=handler), headers, body)).status == 200
    [(op, event)] = seen
    assert (op.key, event.id, event.source, event.type) == ("ev_1", "ev_1", "stripe", "refund.succeeded")
    assert (event.raw, event.data) == (body, json.loads(body))
    assert event.time is not None
    assert event.time.year == 2023
    assert event.traceparent == headers["traceparent"]


async def test_plain_handler_does_not_block_the_event_loop() -> None:
    released = threading.Event()
    receiver = receiver_for(handler=lambda op, event: released.wait(60))
    body = STRIPE.body()
    task = asyncio.create_task(deliver(receiver, STRIPE.headers(body), body))
    await asyncio.sleep(0.05)
    released.set()
    assert (await task).json()["result"] == "ok"


async def test_webhook_in_progress_is_503_with_retry_after() -> None:
    started, released = asyncio.Event(), asyncio.Event()

    async def handler(op: Op, event: Envelope) -> None:
        started.set()
        await released.wait()

    receiver, body = receiver_for(handler=handler, wait=0), STRIPE.body()
    first = asyncio.create_task(deliver(receiver, STRIPE.headers(body), body))
    await started.wait()
    second = await deliver(receiver, STRIPE.headers(body), body)
    assert (second.status, int(second.headers["retry-after"]) >= 1) == (503, True)
    assert second.json()["error_code"] == "CONFLICT.idempotency.in_progress"
    released.set()
    assert (await first).status == 200


async def test_unknown_outcome_is_503_with_retry_after() -> None:
    guard = Guard("memory://")
    receiver, body = receiver_for(guard=guard), STRIPE.body()
    operation = receiver.inbox.operation("ev_1", "stripe", json.loads(body))
    run(guard.store.hold(run(guard.store.claim(operation, lease=30)), note="its holder vanished"))  # type: ignore[arg-type]
    answer = await deliver(receiver, STRIPE.headers(body), body)
    assert (answer.status, answer.headers["retry-after"]) == (503, "60")
    assert answer.json()["error_code"] == "CONFLICT.idempotency.outcome_unknown"


async def test_handler_in_doubt_is_503_and_not_called_again() -> None:
    calls: list[str] = []

    def handler(op: Op, event: Envelope) -> None:
        calls.append(event.id)
        raise UnknownOutcome("The provider did not answer")

    receiver, body = receiver_for(handler=handler), STRIPE.body()
    for _ in range(2):
        answer = await deliver(receiver, STRIPE.headers(body), body)
        assert (answer.status, answer.headers["retry-after"]) == (503, "60")
    assert calls == ["ev_1"]


async def test_store_that_is_down_is_503_and_not_named() -> None:
    guard = Guard("memory://")
    guard.store = FaultyStore.around(guard.store)
    receiver = Receiver(Inbox(guard, effect="lease"), "stripe", secrets=[SECRET], handler=ignore, source="x")
    body = STRIPE.body()

    def fail(operation: Any, **options: Any) -> Any:
        raise StoreUnavailable(f"{INTERNAL} is down")

    guard.store.claim = fail  # type: ignore[method-assign]
    answer = await deliver(receiver, STRIPE.headers(body), body)
    assert (answer.status, int(answer.headers["retry-after"]) >= 1) == (503, True)
    assert answer.json()["error_code"] == "DEPENDENCY.unavailable"
    assert INTERNAL.encode() not in answer.body


async def test_refusal_of_the_handler_is_500_and_sent_again() -> None:
    """The first delivery comes too early for the payment's state, and the next one succeeds."""
    states = [WrongState("'p1' is 'authorized'"), None]

    def handler(op: Op, event: Envelope) -> None:
        if error := states.pop(0):
            raise error

    receiver, body = receiver_for(handler=handler), STRIPE.body()
    answers = [await deliver(receiver, STRIPE.headers(body), body) for _ in range(2)]
    assert [each.status for each in answers] == [500, 200]
    assert b"authorized" not in answers[0].body


async def test_disconnect_does_not_cancel_the_handler() -> None:
    done: list[str] = []
    started = asyncio.Event()

    async def handler(op: Op, event: Envelope) -> None:
        started.set()
        await asyncio.sleep(0.05)
        done.append(event.id)

    receiver, body = receiver_for(handler=handler), STRIPE.body()
    task = asyncio.create_task(deliver(receiver, STRIPE.headers(body), body))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["ev_1"]
    assert (await deliver(receiver, STRIPE.headers(body), body)).json()["result"] == "replayed"


async def test_disconnect_within_the_body_is_no_webhook() -> None:
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> Any:
        return messages.pop()

    async def send(message: Any) -> None:
        raise AssertionError("there is nobody to answer")

    await receiver_for()({"type": "http", "method": "POST", "headers": []}, receive, send)
    assert messages == []


async def test_app_starts_and_stops_and_closes_websockets() -> None:
    sent: list[str] = []
    messages = ["lifespan.shutdown", "lifespan.startup"]

    async def receive() -> Any:
        return {"type": messages.pop()}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await receiver_for()({"type": "lifespan"}, receive, send)
    await receiver_for()({"type": "websocket"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


async def test_retention_shorter_than_the_senders_retries_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    receiver, sender = receiver_for(SENDERS["standard"]), SENDERS["standard"]

    async def send(id: str, until: Any) -> None:
        body = sender.body(id)
        assert (await deliver(receiver, {**sender.headers(body, id), "webhook-retry-until": until}, body)).status == 200

    with caplog.at_level(logging.WARNING, "oncemore.webhooks"):
        for until in (int(time.time()) + 86400, "soon", "-1", "9" * 50, ""):
            await send(f"ev_{until}", until)
        assert caplog.text == ""
        for id in ("ev_a", "ev_b"):
            await send(id, int(time.time()) + 30 * 86400)
    assert caplog.text.count("retention='30d'") == 1


async def test_refused_and_flagged_webhooks_are_events_of_the_guard(caplog: pytest.LogCaptureFixture) -> None:
    events: list[Event] = []
    receiver = receiver_for(guard=Guard("memory://", observers=[events.append]))
    body, other = STRIPE.body(), STRIPE.body(amount=7)
    await deliver(receiver, {"Stripe-Signature": "t=1,v1=00"}, body)
    for each in (body, other):
        await deliver(receiver, STRIPE.headers(each), each)
    refused = [(event.operation.name, event.code) for event in events if event.kind == "refused"]
    assert refused == [
        ("inbox.stripe", "AUTH.webhook_signature"),
        ("inbox.stripe", "CONFLICT.idempotency.payload_mismatch"),
    ]
    assert "was not handled: flagged" in caplog.text


async def test_handler_by_type_goes_before_the_handler_for_all() -> None:
    seen: list[str] = []
    receiver = receiver_for(handler=lambda op, event: seen.append("all"))

    @receiver.on("refund.succeeded", "refund.failed")
    def by_type(op: Op, event: Envelope) -> None:
        seen.append(event.type)

    for id, type in (("1", "refund.succeeded"), ("2", "refund.failed"), ("3", "charge.failed"), ("4", "")):
        body = STRIPE.body(id, type=type)
        assert (await deliver(receiver, STRIPE.headers(body), body)).json()["result"] == "ok"
    assert seen == ["refund.succeeded", "refund.failed", "all", "all"]
    with pytest.raises(ConfigurationError, match="have a handler already"):
        receiver.on("refund.failed")(by_type)
    with pytest.raises(ConfigurationError, match="Name the types"):
        receiver.on(by_type)  # type: ignore[arg-type]


async def test_scheme_of_the_users_own_is_used() -> None:
    class Trusting:
        name = "intranet"

        def verify(self, headers: Pairs, body: bytes) -> None:
            pass

        def describe(self, headers: Pairs, data: Any) -> Description:
            return Description(id=data["id"], type="any", compared=data)

    class Complete(Trusting, Scheme):
        pass

    inbox = Inbox(Guard("memory://"), effect="lease")
    with pytest.raises(ConfigurationError, match="a subclass of Scheme"):  # its first webhook would fail
        Receiver(inbox, Trusting(), handler=ignore)  # type: ignore[arg-type]
    receiver = Receiver(inbox, Complete(), handler=ignore)
    assert (await deliver(receiver, {}, b'{"id": "1"}')).json()["source"] == "intranet"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"inbox": Guard("memory://")}, "make an Inbox"), ({"scheme": "strip"}, "did you mean 'stripe'"),
     ({"secrets": []}, "secret"), ({"max_request": "much"}, "not a size"), ({"header": "X"}, "no option 'header'")],
)  # fmt: skip
def test_receiver_that_cannot_work_is_refused(wrong: dict[str, Any], message: str) -> None:
    settings = {"inbox": Inbox(Guard("memory://"), effect="lease"), "scheme": "stripe", "secrets": [SECRET], **wrong}
    with pytest.raises(ConfigurationError, match=message):
        Receiver(**settings)


def test_receiving_needs_no_other_package() -> None:
    """Receiving needs no aiohttp, cryptography or framework.  Names that need a package say how to install it."""
    program = """
import sys
for name in ("aiohttp", "cryptography", "fastapi", "starlette", "django", "httpx"):
    sys.modules[name] = None
from oncemore import Guard, Inbox
from oncemore.errors import MissingDriver
from oncemore.webhooks import Receiver, Signing
Receiver(Inbox(Guard("memory://"), effect="lease"), "stripe", secrets=["x"])
try:
    from oncemore.webhooks import SafeConnector
except MissingDriver as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'oncemore[webhooks]'" in ran.stdout


@pytest.mark.parametrize("awaited", [True, False])
async def test_requeued_dead_letter_is_handled_with_its_envelope(awaited: bool) -> None:
    broken, seen = [True], []

    def handler(op: Op, event: Envelope) -> None:
        if broken:
            raise RuntimeError("cannot be handled")
        seen.append((event.id, event.type, event.data["data"]))

    async def ahandler(op: Op, event: Envelope) -> None:
        handler(op, event)

    inbox = Inbox(Guard("memory://"), effect="lease", attempts=1, name="webhooks")
    stripe = Receiver(inbox, "stripe", secrets=[SECRET], handler=ahandler if awaited else handler)
    github = Receiver(inbox, "github", secrets=[SECRET], handler=ignore)
    body = STRIPE.body()
    assert (await deliver(stripe, STRIPE.headers(body), body)).json()["result"] == "dead letter"
    await inbox.arequeue("ev_1", "stripe")
    broken.clear()
    assert await github.arun_requeued() == 0  # it is the other receiver's
    assert await (stripe.arun_requeued() if awaited else asyncio.to_thread(stripe.run_requeued)) == 1
    assert seen == [("ev_1", "refund.succeeded", {"amount": 1000})]
    assert (await deliver(stripe, STRIPE.headers(body), body)).json()["result"] == "replayed"


async def test_flagged_webhook_is_listed_with_its_envelope() -> None:
    inbox = Inbox(Guard("memory://"), effect="lease", name="webhooks")
    receiver = Receiver(inbox, "stripe", secrets=[SECRET], handler=ignore)
    for amount in (1, 2):
        body = STRIPE.body(amount=amount)
        await deliver(receiver, STRIPE.headers(body), body)
    [record] = (await inbox.aflagged("stripe")).records
    assert record.outcome is not None
    assert parse_structured(replayed(record.outcome)).data["amount"] == 2


async def test_pattern_chooses_the_handler() -> None:
    seen: list[str] = []
    receiver = receiver_for(handler=lambda op, event: seen.append("all"))
    receiver.on("refund.*")(lambda op, event: seen.append("pattern"))
    for id, type in (("1", "refund.succeeded"), ("2", "charge.refund.succeeded")):
        body = STRIPE.body(id, type=type)
        await deliver(receiver, STRIPE.headers(body), body)
    assert seen == ["pattern", "all"]


# Hostile headers

GARBAGE = [
    b"", b" ", b",", b"=", b"v1", b"v1,", b"v1=", b"t=,v1=", b"sha256=", b"v0=", b"\x00", b"\xff" * 40, b"A" * 9000,
    b"None", b"null", b"{}", b"v1,v1,v1", b"t=1,t=1,v1=00", b"9" * 4000, b"-1", b"1e9", b"0x10", b"%00", b"\xc3\xa9", b"v1a,",
    b"../../etc/passwd", b"' OR 1=1 --", b"\xe2\x80\xae", b"v1," * 2000, b" ".join([b"v1,AA=="] * 100), b"t=9e99,v1=ff",
]  # fmt: skip


def mutated(value: bytes, chance: random.Random) -> bytes:
    """Return *value* with something changed: a byte, its end, its case, its order, or all of it."""
    way = chance.randrange(8)
    place = chance.randrange(len(value))
    if way == 0:
        return value[:place] + bytes([value[place] ^ (1 << chance.randrange(8))]) + value[place + 1 :]
    if way == 1:
        return value[:place]
    if way == 2:
        return value + chance.choice(GARBAGE)
    if way == 3:
        return chance.choice(GARBAGE) + value[place:]
    if way == 4:
        return value[place:] + value[:place]
    if way == 5:
        return bytes(chance.randrange(256) for _ in range(chance.randrange(200)))
    if way == 6:
        return value[:place] + chance.choice([b" ", b"\t", b"\r\n", b"\x00", b","]) + value[place:]
    return chance.choice(GARBAGE)


def signed_headers(sender: Sender, headers: Headers) -> list[str]:
    """Return the names of the headers that the sender signs, or that contain the signature."""
    unsigned = ("X-GitHub-", "X-Shopify-W", "X-Shopify-T", "X-Event-Id")
    return [name for name in headers if not name.startswith(unsigned)]


def is_genuine(name: str, hostile: bytes, genuine: str) -> bool:
    """Whether a mutation kept the meaning: hexadecimal digits may have either case, and a header of Stripe or Standard
    Webhooks may have further items."""
    same = hostile.decode("latin-1")
    if same.lower() == genuine.lower():
        return True
    marks = {"Stripe-Signature": ",", "webhook-signature": " ", "svix-signature": " "}
    mark = marks.get(name)
    return mark is not None and set(genuine.split(mark)) <= set(same.split(mark))


async def test_ten_thousand_hostile_headers_are_refused() -> None:
    chance, handled = random.Random(20261118), []
    receivers = {name: receiver_for(sender, lambda *_: handled.append(1)) for name, sender in SENDERS.items()}
    logging.getLogger("oncemore.webhooks").setLevel(logging.CRITICAL)
    statuses = set()
    try:
        for number in range(10_000):
            name = chance.choice(list(SENDERS))
            sender = SENDERS[name]
            body = sender.body(f"ev_{number}")
            headers: dict[str, Any] = sender.headers(body, f"ev_{number}")
            victim = chance.choice(signed_headers(sender, headers))
            hostile = mutated(headers[victim].encode(), chance)
            if is_genuine(victim, hostile, headers[victim]):
                continue
            answer = await deliver(receivers[name], {**headers, victim: hostile}, body)
            assert answer.status == 401, (name, victim, hostile)
            statuses.add(answer.status)
    finally:
        logging.getLogger("oncemore.webhooks").setLevel(logging.NOTSET)
    assert (statuses, handled) == ({401}, [])


@given(
    name=st.sampled_from(list(SENDERS)),
    headers=st.lists(st.tuples(st.sampled_from(
        ["webhook-id", "webhook-timestamp", "webhook-signature", "svix-signature", "stripe-signature", "x-signature",
         "x-hub-signature-256", "x-shopify-hmac-sha256", "x-slack-signature", "x-slack-request-timestamp", "x-event-id"]
    ), st.binary(max_size=200) | st.sampled_from(GARBAGE)), max_size=12),
    body=st.binary(max_size=100),
)  # fmt: skip
def test_arbitrary_headers_and_bodies_are_refused(name: str, headers: Any, body: bytes) -> None:
    answer = asyncio.run(deliver(receiver_for(SENDERS[name]), headers, body))
    assert answer.status == 401


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["id", "type", "event_id", "event", "data", "created", "challenge"]) | st.text(), inner, max_size=6
    ), max_leaves=12,
), st.sampled_from(list(SENDERS)))  # fmt: skip
def test_genuine_webhook_of_any_json_is_handled_or_refused(data: Any, name: str) -> None:
    sender, body = SENDERS[name], json.dumps(data).encode()
    answer = asyncio.run(deliver(receiver_for(sender), sender.headers(body, "ev_1"), body))
    assert answer.status in (200, 400)
