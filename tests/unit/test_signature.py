"""Standard Webhooks v1: signed messages verify, and everything else raises WebhookError and no other error."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oncemore.errors import ConfigurationError, Refusal, WebhookError
from oncemore.webhooks.signature import ID, SIGNATURE, TIMESTAMP, Message, Signing, new_id, new_secret

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_" + base64.b64encode(b"another secret of 24 byt").decode()
WHEN = 1614265330
BODY = b'{"test": 2432232314}'
VECTOR = {
    ID: "msg_p5jXN8AQM9LWM0D4loKWxJek",
    TIMESTAMP: str(WHEN),
    SIGNATURE: "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}


class FixedClock:
    """A clock that does not advance."""

    def __init__(self, now: float = WHEN) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def signing(*secrets: str | bytes, now: float = WHEN, **settings: Any) -> Signing:
    return Signing(*(secrets or (SECRET,)), clock=FixedClock(now), **settings)


def refusal_of(headers: Any, body: bytes = BODY, **settings: Any) -> str:
    with pytest.raises(WebhookError) as caught:
        signing(**settings).verify(headers, body)
    return caught.value.detail


def test_vector_of_the_standard_is_signed_and_verified() -> None:
    assert signing().sign(BODY, id=VECTOR[ID], timestamp=WHEN) == VECTOR
    assert signing().verify(VECTOR, BODY) == Message(VECTOR[ID], WHEN)


def test_signature_is_hmac_of_id_timestamp_and_body() -> None:
    """The test computes the signature itself, so that the same mistake in `sign` and `verify` is found."""
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    content = b"msg_1.1614265330.\x00\xff"
    by_hand = base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
    assert signing().sign(b"\x00\xff", id="msg_1")[SIGNATURE] == f"v1,{by_hand}"


@given(body=st.binary(max_size=300), flip=st.integers(0, 299))
def test_one_changed_bit_of_the_body_is_refused(body: bytes, flip: int) -> None:
    headers = signing().sign(body)
    assert signing().verify(headers, body).id == headers[ID]
    changed = bytearray(body or b"\0")
    changed[flip % len(changed)] ^= 1
    refusal_of(headers, bytes(changed))


def test_rotation_accepts_old_and_new_secrets() -> None:
    by_both = signing(SECRET, OTHER).sign(BODY)
    assert by_both[SIGNATURE].count("v1,") == 2
    for secret in (SECRET, OTHER):
        assert signing(secret).verify(by_both, BODY)
        assert signing(SECRET, OTHER).verify(signing(secret).sign(BODY), BODY)
    with pytest.raises(WebhookError, match="another secret"):
        signing(OTHER).verify(signing(SECRET).sign(BODY), BODY)


@pytest.mark.parametrize("off", [-301, 301, -1e12, 1e12])
def test_timestamp_beyond_tolerance_is_refused(off: float) -> None:
    detail = refusal_of(VECTOR, now=WHEN + off)
    assert ("too old" if off > 0 else "in the future") in detail


@pytest.mark.parametrize("off", [-300, 0, 300])
def test_timestamp_within_tolerance_is_accepted(off: float) -> None:
    assert signing(now=WHEN + off).verify(VECTOR, BODY)


def test_tolerance_option_is_used() -> None:
    refusal_of(VECTOR, now=WHEN + 11, tolerance="10s")
    assert signing(now=WHEN + 3600, tolerance="1h").verify(VECTOR, BODY)


@pytest.mark.parametrize("name", [ID, TIMESTAMP, SIGNATURE])
def test_missing_or_repeated_header_is_refused(name: str) -> None:
    assert "missing" in refusal_of({key: value for key, value in VECTOR.items() if key != name})
    assert "more than once" in refusal_of([*VECTOR.items(), (name.upper(), VECTOR[name])])


def test_headers_may_be_any_case_and_bytes() -> None:
    raw = [(name.title().encode(), value.encode()) for name, value in VECTOR.items()]
    assert signing().verify([(b"x-other", b"\xff"), *raw], BODY).id == VECTOR[ID]
    assert signing().verify((pair for pair in raw), BODY).id == VECTOR[ID]


@pytest.mark.parametrize(
    "timestamp",
    ["", " ", "now", "-1614265330", "+1614265330", "1614265330.0", "1_614_265_330", "01614265330", "1e9", "١٦١٤٢٦٥٣٣٠",
     "9" * 5000, "1614265330\n", " 1614265330", "0x60377b72", "nan", "inf"],
)  # fmt: skip
def test_timestamp_must_be_plain_digits(timestamp: str) -> None:
    """Even if the signature is correct for that text."""
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    content = f"{VECTOR[ID]}.{timestamp}.".encode() + BODY
    signature = "v1," + base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
    refusal_of({**VECTOR, TIMESTAMP: timestamp, SIGNATURE: signature})


def test_full_stop_in_the_id_is_refused() -> None:
    """Full stops join the parts, so with one in the id, two messages would have the same signature."""
    first = signing().sign(b"1614265331.{}", id="msg")
    moved = {**first, ID: f"msg.{WHEN}", TIMESTAMP: "1614265331"}
    assert "webhook-id" in refusal_of(moved, b"{}")
    with pytest.raises(ConfigurationError):
        signing().sign(b"", id="msg.1")


@pytest.mark.parametrize(
    "signature",
    ["", " ", ",", "v1", "v1,", "v1,=", "v1a,abc", "v2," + VECTOR[SIGNATURE][3:], VECTOR[SIGNATURE][3:],
     VECTOR[SIGNATURE].lower(), VECTOR[SIGNATURE].replace("=", ""), VECTOR[SIGNATURE] + "=", "V1" + VECTOR[SIGNATURE][2:],
     VECTOR[SIGNATURE].replace(",", ", "), "v1,v1," + VECTOR[SIGNATURE][3:], "v1,é", "\ud800", "v1," + "A" * 9000,
     " ".join(["v1,AAAA"] * 33)],
)  # fmt: skip
def test_malformed_signatures_are_refused(signature: str) -> None:
    refusal_of({**VECTOR, SIGNATURE: signature})


def test_signatures_of_other_versions_are_ignored() -> None:
    crowd = f"v1a,bm90IG91cnM= v1,bm90IG91cnM= {VECTOR[SIGNATURE]} v9,x"
    assert signing().verify({**VECTOR, SIGNATURE: crowd}, BODY)


ANYTHING = st.one_of(st.text(), st.binary(), st.none(), st.integers(), st.sampled_from([*VECTOR.values(), "v1,"]))
NAMES = st.one_of(st.sampled_from([ID, TIMESTAMP, SIGNATURE, "Webhook-Id"]), st.text(), st.binary())


@given(headers=st.lists(st.tuples(NAMES, ANYTHING), max_size=8), body=st.binary(max_size=50))
def test_arbitrary_headers_raise_only_webhook_errors(headers: Any, body: bytes) -> None:
    refusal_of(headers, body)
    refusal_of(dict(headers), body)


@given(name=st.sampled_from([ID, TIMESTAMP, SIGNATURE]), value=ANYTHING)
@example(name=TIMESTAMP, value="9" * 400)
@example(name=SIGNATURE, value=b"v1,\xff")
@example(name=ID, value="\ud800")
def test_one_hostile_header_raises_a_webhook_error(name: str, value: Any) -> None:
    if value == VECTOR[name] or value == VECTOR[name].encode():
        return
    refusal_of({**VECTOR, name: value})


def test_text_as_body_is_refused() -> None:
    """The encoding that the sender used is not known."""
    for call in (lambda body: signing().sign(body), lambda body: signing().verify(VECTOR, body)):
        with pytest.raises(ConfigurationError, match="raw bytes"):
            call(BODY.decode())
    assert signing().verify(VECTOR, memoryview(BODY))  # type: ignore[arg-type]


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_äöü", "whsec_dG9vIHNob3J0", b"too short", "not base64!"])
def test_malformed_secret_is_refused_and_not_shown(secret: str | bytes) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Signing(secret)
    shown = secret if isinstance(secret, str) else secret.decode()
    assert len(shown) < 7 or shown not in caught.value.detail
    with pytest.raises(ConfigurationError, match="needs a secret"):
        Signing()


def test_secret_without_prefix_or_padding_is_accepted() -> None:
    whole = "whsec_" + base64.b64encode(b"x" * 25).decode()
    headers = signing(whole).sign(BODY)
    for secret in (whole.rstrip("="), whole.removeprefix("whsec_"), b"x" * 25):
        assert signing(secret).verify(headers, BODY)


def test_repr_hides_the_secret() -> None:
    assert "MfKQ" not in repr(signing())
    assert "2 secrets" in repr(signing(SECRET, OTHER))


@pytest.mark.parametrize("wrong", [{"id": ""}, {"id": "a b"}, {"id": "é"}, {"timestamp": 0}, {"timestamp": -1}])
def test_sign_refuses_ids_that_verify_would_refuse(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        signing().sign(BODY, **wrong)


def test_new_secrets_and_ids_are_valid_and_unique() -> None:
    made = Signing(new_secret())  # with the system's clock
    assert new_secret() != new_secret()
    assert new_id() != new_id()
    assert made.verify(made.sign(BODY), BODY)


def test_webhook_error_is_a_permanent_401() -> None:
    assert issubclass(WebhookError, Refusal)
    assert (WebhookError.status, WebhookError.retryable) == (401, False)
