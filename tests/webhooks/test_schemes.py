"""The receivers' signature schemes: the providers' own vectors and libraries, rotation, time, and hostile headers."""

from __future__ import annotations

import base64
import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest
import standardwebhooks
import stripe
import svix
from hypothesis import example, given
from hypothesis import strategies as st

from oncemore.errors import ConfigurationError, InvalidPayload, WebhookError
from oncemore.webhooks.schemes import SCHEMES, Scheme, make_scheme

from ..unit.test_signature import FixedClock
from .senders import HMAC_OPTIONS, OTHER, SECRET, SENDERS, Headers, Sender, digest

each_sender = pytest.mark.parametrize("sender", SENDERS.values(), ids=SENDERS)


def scheme_for(sender: Sender, *secrets: str, **options: Any) -> Scheme:
    return make_scheme(sender.scheme, list(secrets) or [SECRET], {**sender.options, **options})


def refusal_of(scheme: Scheme, headers: Any, body: bytes) -> str:
    with pytest.raises(WebhookError) as caught:
        scheme.verify(list(headers.items()) if isinstance(headers, dict) else headers, body)
    return caught.value.detail


# The providers' own vectors and libraries


def test_github_vector_of_its_documentation() -> None:
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    make_scheme("github", "It's a Secret to Everybody", {}).verify(
        [("X-Hub-Signature-256", signature)], b"Hello, World!"
    )


def test_slack_vector_of_its_documentation() -> None:
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V"
        b"&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text="
        b"&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
        b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    headers = [
        ("X-Slack-Request-Timestamp", "1531420618"),
        ("X-Slack-Signature", "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"),
    ]
    scheme = make_scheme("slack", "8f742231b10e8888abcd99yyyzzz85a5", {"clock": FixedClock(1531420618)})
    scheme.verify(headers, body)


def test_shopify_digest_is_base64_of_the_body() -> None:
    body = b'{"id":1}'
    signature = base64.b64encode(digest("hush", body)).decode()
    make_scheme("shopify", "hush", {}).verify([("X-Shopify-Hmac-Sha256", signature)], body)


def test_stripe_library_signs_and_verifies_the_same() -> None:
    sender, body = SENDERS["stripe"], b'{"id": "evt_1", "object": "event", "type": "charge.succeeded"}'
    signed = stripe.WebhookSignature.generate_signature_header(body.decode(), SECRET)
    scheme_for(sender).verify([("Stripe-Signature", signed)], body)
    ours = sender.headers(body)["Stripe-Signature"]
    assert stripe.Webhook.construct_event(body, ours, SECRET).id == "evt_1"


@pytest.mark.parametrize("library", [svix.Webhook, standardwebhooks.Webhook])
def test_svix_and_standard_libraries_sign_and_verify_the_same(library: Any) -> None:
    body, id, now = b'{"type": "charge.succeeded"}', "msg_1", int(time.time())
    signature = library(SECRET).sign(id, datetime.fromtimestamp(now, UTC), body.decode())
    for name in ("standard", "svix"):
        ours = SENDERS[name].headers(body, id, when=now)
        prefix = next(iter(ours)).partition("-")[0]
        assert ours[f"{prefix}-signature"] == signature
        scheme_for(SENDERS[name]).verify(list(ours.items()), body)
    library(SECRET).verify(body, SENDERS["standard"].headers(body, id, when=now))
    svix.Webhook(SECRET).verify(body, SENDERS["svix"].headers(body, id, when=now))


# Every scheme


@each_sender
def test_genuine_webhook_is_described(sender: Sender) -> None:
    body = sender.body()
    headers = list(sender.headers(body).items())
    scheme = scheme_for(sender)
    scheme.verify(headers, body)
    event = scheme.describe(headers, json.loads(body))
    assert (event.id, event.type) == ("ev_1", "refund.succeeded")
    assert scheme.challenge(json.loads(body)) is None


@each_sender
def test_either_secret_is_accepted_during_rotation(sender: Sender) -> None:
    body = sender.body()
    for secret in (SECRET, OTHER):
        scheme_for(sender, SECRET, OTHER).verify(list(sender.headers(body, secret=secret).items()), body)
    assert "another secret" in refusal_of(scheme_for(sender, OTHER), sender.headers(body), body)


@each_sender
def test_changed_body_is_refused(sender: Sender) -> None:
    headers = sender.headers(sender.body())
    assert "No signature matches" in refusal_of(scheme_for(sender), headers, sender.body(amount=1))


@pytest.mark.parametrize("off", [-301, 301])
@pytest.mark.parametrize("name", [name for name, sender in SENDERS.items() if sender.timed])
def test_time_beyond_tolerance_is_refused_on_both_sides(name: str, off: int) -> None:
    sender, body, now = SENDERS[name], SENDERS[name].body(), 1_700_000_000
    headers = sender.headers(body, when=now)
    assert "too" in refusal_of(scheme_for(sender, clock=FixedClock(now + off)), headers, body)
    scheme_for(sender, clock=FixedClock(now + off), tolerance="302s").verify(list(headers.items()), body)


@each_sender
def test_missing_or_repeated_header_is_refused(sender: Sender) -> None:
    body = sender.body()
    headers = sender.headers(body)
    signature = next(name for name in headers if "signature" in name.lower() or "hmac" in name.lower())
    without = {name: value for name, value in headers.items() if name != signature}
    assert "missing" in refusal_of(scheme_for(sender), without, body)
    assert "more than once" in refusal_of(
        scheme_for(sender), [*headers.items(), (signature.upper(), headers[signature])], body
    )


@each_sender
@given(st.data())
def test_hostile_headers_raise_only_webhook_errors(sender: Sender, data: st.DataObject) -> None:
    body = sender.body()
    headers: dict[Any, Any] = sender.headers(body)
    signed = [name for name in headers if not name.startswith(("X-GitHub-", "X-Shopify-T", "X-Shopify-W", "X-Event"))]
    name = data.draw(st.sampled_from(signed))
    value = data.draw(HOSTILE | st.sampled_from(list(headers.values())))
    if value in (headers[name], headers[name].encode()):
        return
    refusal_of(scheme_for(sender), {**headers, name: value}, body)


HOSTILE = st.one_of(
    st.text(), st.binary(), st.none(), st.integers(), st.text("0123456789abcdef=,tv1 "), st.just("9" * 9000)
)


@pytest.mark.parametrize(
    "header",
    ["", "t=", "v1=00", "t=1,t=2,v1=00", "t=now,v1=00", "t=1492774577", "t=1492774577,v1", "t=1,v1=" + "zz" * 32,
     "t=1,v1=" + " ".join(["00"] * 32), ",,,,", "=", "t=1," + ",".join(["v1=00"] * 40), "t=1,v1=é", "t=1,v1=\ud800"],
)  # fmt: skip
def test_malformed_stripe_header_is_refused(header: str) -> None:
    refusal_of(scheme_for(SENDERS["stripe"]), {"Stripe-Signature": header}, b"{}")


def test_stripe_time_must_be_plain_digits_even_if_signed() -> None:
    for time_text in ("-1", "1e9", "١", "1.0", "9" * 30, ""):
        signature = digest(SECRET, f"{time_text}.{{}}".encode()).hex()
        headers = [("Stripe-Signature", f"t={time_text},v1={signature}".encode())]
        assert "t" in refusal_of(scheme_for(SENDERS["stripe"]), headers, b"{}")


def test_hexadecimal_digest_with_blanks_is_refused() -> None:
    """`bytes.fromhex` would skip the blanks, but a signature has one spelling, apart from the case of its digits."""
    body = b"{}"
    spaced = digest(SECRET, body).hex(" ")
    refusal_of(make_scheme("github", SECRET, {}), {"X-Hub-Signature-256": f"sha256={spaced}"}, body)


def test_standard_headers_of_both_names_are_never_mixed() -> None:
    """An attacker must not be able to put another id beside a genuine signature."""
    body, scheme = b"{}", scheme_for(SENDERS["svix"])
    genuine = SENDERS["svix"].headers(body, "msg_1")
    mixed = {**genuine, "webhook-id": "msg_2"}
    scheme.verify(list(mixed.items()), body)
    assert scheme.describe(list(mixed.items()), {}).id == "msg_1"
    refusal_of(scheme, {**genuine, **SENDERS["standard"].headers(body, "msg_2", secret=OTHER)}, body)


def test_stripe_count_of_pending_webhooks_is_not_compared() -> None:
    scheme = scheme_for(SENDERS["stripe"])
    first, second = (scheme.describe([], {"id": "evt_1", "pending_webhooks": n}).compared for n in (2, 1))
    assert first == second == {"id": "evt_1"}


def test_slack_url_verification_has_a_challenge() -> None:
    scheme = scheme_for(SENDERS["slack"])
    assert scheme.challenge({"type": "url_verification", "challenge": "3eZb"}) == b"3eZb"
    assert scheme.challenge({"type": "url_verification", "challenge": 7}) == b""


@each_sender
@pytest.mark.parametrize("data", [None, 7, "text", [], {}, {"id": None}, {"id": []}, {"event_id": {}}, {"type": 7}])
def test_event_without_id_is_an_invalid_payload(sender: Sender, data: Any) -> None:
    headers = [] if sender.scheme not in ("standard", "svix") else list(sender.headers(b"{}", "msg_1").items())
    scheme = scheme_for(sender)
    if headers:  # the id is in a header, and signed
        assert scheme.describe(headers, data).type == ""
    else:
        with pytest.raises(InvalidPayload, match="no id"):
            scheme.describe(headers, data)


@pytest.mark.parametrize(
    ("value", "year"),
    [("2026-02-19T12:00:00Z", 2026), (1_700_000_000, 2023), (1.7e9, 2023), (True, None), ("soon", None), (1e300, None),
     ("", None), (None, None), (float("nan"), None)],
)  # fmt: skip
def test_time_of_the_event_is_read_or_left_out(value: Any, year: int | None) -> None:
    found = scheme_for(SENDERS["stripe"]).describe([], {"id": "evt_1", "created": value}).time
    assert (found.year if found else None) == year


# The configurable one


def hmac_scheme(**options: Any) -> Scheme:
    return make_scheme("hmac", SECRET, {**HMAC_OPTIONS, **options})


@pytest.mark.parametrize("algorithm", ["sha1", "sha256", "sha384", "sha512"])
@pytest.mark.parametrize("encoding", ["hex", "base64"])
def test_hmac_algorithm_encoding_and_prefix(algorithm: str, encoding: str) -> None:
    raw = digest(SECRET, b"{}", algorithm)
    text = raw.hex() if encoding == "hex" else base64.b64encode(raw).decode()
    scheme = hmac_scheme(algorithm=algorithm, encoding=encoding, prefix="sig:")
    scheme.verify([("x-signature", f"sig:{text}")], b"{}")
    refusal_of(scheme, {"x-signature": text}, b"{}")
    refusal_of(scheme, {"x-signature": f"sig:{text[:-4]}"}, b"{}")


def test_hmac_signed_id_and_time_are_part_of_the_content() -> None:
    scheme = hmac_scheme(signed="v1:{id}:{timestamp}:{body}", timestamp_header="X-Time", clock=FixedClock(1000))
    headers: Headers = {"X-Event-Id": "7", "X-Time": "1000", "X-Signature": digest(SECRET, b"v1:7:1000:{}").hex()}
    scheme.verify(list(headers.items()), b"{}")
    refusal_of(scheme, {**headers, "X-Event-Id": "8"}, b"{}")
    refusal_of(scheme, {**headers, "X-Event-Id": ""}, b"{}")
    moved = {**headers, "X-Event-Id": "7:1000", "X-Time": "1000"}
    assert "malformed" in refusal_of(scheme, moved, b"{}")
    late = hmac_scheme(signed="v1:{id}:{timestamp}:{body}", timestamp_header="X-Time", clock=FixedClock(2000))
    assert "too old" in refusal_of(late, headers, b"{}")


def test_hmac_id_and_type_from_pointers_and_headers() -> None:
    scheme = make_scheme("hmac", SECRET, {"id_pointer": "/event/id", "type_pointer": "/event/kind"})
    event = scheme.describe([], {"event": {"id": 7, "kind": "paid"}})
    assert (event.id, event.type) == ("7", "paid")
    by_header = hmac_scheme(type_header="X-Type").describe([("x-event-id", "8"), ("X-TYPE", "paid")], {})
    assert (by_header.id, by_header.type) == ("8", "paid")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"id_header": ""}, "where the event's id is"), ({"id_pointer": "/id"}, "where the event's id is"),
     ({"signed": "{timestamp}.{body}"}, "belong together"), ({"timestamp_header": "X-Time"}, "belong together"),
     ({"signed": "{id}"}, "needs {body} once"), ({"signed": "{body}{body}"}, "needs {body} once"),
     ({"signed": "{timestamp}{body}", "timestamp_header": "X-Time"}, "a mark between"),
     ({"signed": "{id}.{body}", "id_header": "", "id_pointer": "/id"}, "needs id_header"),
     ({"algorithm": "md5"}, "'md5' is unknown"), ({"encoding": "base32"}, "did you mean 'base64'"),
     ({"id_header": "", "id_pointer": "id"}, "not a JSON pointer"), ({"headers": "X"}, "did you mean 'header'")],
)  # fmt: skip
def test_hmac_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        hmac_scheme(**options)


@pytest.mark.parametrize("name", SCHEMES)
def test_scheme_without_a_secret_is_refused(name: str) -> None:
    for secrets in ([], [""], ""):
        with pytest.raises(ConfigurationError, match="secret"):
            make_scheme(name, secrets, SENDERS[name].options)


def test_unknown_scheme_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'stripe'"):
        make_scheme("strip", SECRET, {})
    with pytest.raises(ConfigurationError, match="verify"):
        make_scheme(object(), SECRET, {})  # type: ignore[arg-type]


@given(text=st.text(), secret=st.binary(min_size=1))
@example(text="", secret=b"x")
def test_binary_secrets_and_any_body_verify(text: str, secret: bytes) -> None:
    import hmac

    body = text.encode("utf-8", "surrogatepass")
    signature = hmac.digest(secret, body, "sha256").hex()
    make_scheme("hmac", secret, HMAC_OPTIONS).verify([("x-signature", signature.upper())], body)
