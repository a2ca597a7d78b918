"""Standard Webhooks v1a: Ed25519, against RFC 8032 and the cryptography package."""

from __future__ import annotations

import base64
import builtins
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from oncemore.errors import ConfigurationError, MissingDriver, WebhookError
from oncemore.webhooks.signature import SIGNATURE, Ed25519Key, Signing, new_key_pair, new_secret, public_key

from ..unit.test_signature import BODY, SECRET, VECTOR, WHEN, signing

# RFC 8032, 7.1, test 1: the signature of an empty message.
SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
OF_NOTHING = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
)
PRIVATE_KEY = "whsk_" + base64.b64encode(SEED + PUBLIC).decode()
PUBLIC_KEY = "whpk_" + base64.b64encode(PUBLIC).decode()


def test_vector_of_rfc_8032_is_signed_and_verified() -> None:
    key = Ed25519Key(PRIVATE_KEY)
    signature = base64.b64encode(OF_NOTHING).decode()
    assert key.sign(b"") == signature
    assert key.public == PUBLIC_KEY == public_key(PRIVATE_KEY)
    assert Ed25519Key(PUBLIC_KEY).matches(b"", [signature])
    assert not Ed25519Key(PUBLIC_KEY).matches(b"x", [signature])


def test_signature_is_of_id_timestamp_and_body() -> None:
    headers = signing(PRIVATE_KEY).sign(BODY, id="msg_1", timestamp=WHEN)
    version, _, text = headers[SIGNATURE].partition(",")
    assert version == "v1a"
    content = f"msg_1.{WHEN}.".encode() + BODY
    Ed25519PublicKey.from_public_bytes(PUBLIC).verify(base64.b64decode(text), content)
    by_hand = Ed25519PrivateKey.from_private_bytes(SEED).sign(content)
    assert signing(PUBLIC_KEY).verify({**headers, SIGNATURE: f"v1a,{base64.b64encode(by_hand).decode()}"}, BODY)


def test_private_key_may_be_the_seed_alone() -> None:
    seed = "whsk_" + base64.b64encode(SEED).decode()
    assert signing(seed).sign(BODY, id="m") == signing(PRIVATE_KEY).sign(BODY, id="m")


def test_rotation_between_both_versions_signs_with_all() -> None:
    headers = signing(SECRET, PRIVATE_KEY).sign(BODY)
    assert [each.partition(",")[0] for each in headers[SIGNATURE].split()] == ["v1", "v1a"]
    for key in (SECRET, PUBLIC_KEY, PRIVATE_KEY):
        assert signing(key).verify(headers, BODY)
    other, other_public = new_key_pair()
    with pytest.raises(WebhookError, match="another secret"):
        signing(other_public, other).verify(headers, BODY)


def test_signature_of_one_version_is_no_signature_of_the_other() -> None:
    headers = signing(PRIVATE_KEY).sign(BODY)
    with pytest.raises(WebhookError):
        signing(PUBLIC_KEY).verify({**headers, SIGNATURE: headers[SIGNATURE].replace("v1a,", "v1,")}, BODY)
    with pytest.raises(WebhookError):
        signing(PUBLIC_KEY).verify({**VECTOR, SIGNATURE: VECTOR[SIGNATURE].replace("v1,", "v1a,")}, BODY)


def test_public_key_cannot_sign() -> None:
    with pytest.raises(ConfigurationError, match="can only verify"):
        Signing(PUBLIC_KEY).sign(BODY)
    both = signing(SECRET, PUBLIC_KEY).sign(BODY)
    assert both[SIGNATURE].startswith("v1,")
    assert " " not in both[SIGNATURE]


@given(text=st.text() | st.binary().map(lambda raw: base64.b64encode(raw).decode()))
def test_hostile_signatures_raise_only_webhook_errors(text: str) -> None:
    with pytest.raises(WebhookError):
        signing(PUBLIC_KEY).verify({**VECTOR, SIGNATURE: f"v1a,{text}"}, BODY)


@pytest.mark.parametrize(
    "key",
    ["whsk_", "whpk_", "whpk_!!!", "whsk_" + "A" * 20, "whpk_" + base64.b64encode(SEED + PUBLIC).decode(),
     "whsk_" + base64.b64encode(SEED + SEED).decode()],
)  # fmt: skip
def test_malformed_key_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Signing(key)
    assert len(key) < 7 or key[5:] not in caught.value.detail


def test_new_key_pairs_are_valid_and_unique() -> None:
    private, public = new_key_pair()
    assert new_key_pair()[0] != private
    assert Signing(public).verify(Signing(private).sign(BODY), BODY)
    assert private[5:] not in repr(Signing(private))


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("cryptography"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDriver, match=r"pip install 'oncemore\[cryptography\]'"):
        Signing(PRIVATE_KEY)
    assert Signing(new_secret()).sign(BODY)
