"""Encrypted connections to brokers: a private certificate authority, a client certificate, a password."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from oncemore.errors import BrokerError
from oncemore.messages import Envelope
from oncemore.messages.broker import connect
from tests.stores.redis.tls_front import make_certificate, tls_front
from tests.support.brokers import NatsServer

pytestmark = pytest.mark.server


async def send_and_receive(url: str) -> int:
    """Send a message over the encrypted connection, and return the number that comes back."""
    broker = connect(url)
    try:
        subscription = broker.subscribe("g")
        await subscription.aopen()
        sent = Envelope("refund.succeeded", 7, id=secrets.token_hex(8), source="payments", subject="rf_1")
        assert await broker.publish([sent]) == [None]
        [delivery] = await subscription.receive(1, 30.0)
        await delivery.ack()
        await subscription.aclose()
        assert delivery.envelope is not None
        return int(delivery.envelope.data)
    finally:
        await broker.aclose()


@pytest.mark.parametrize("kind", ["rabbitmq", "redis"])
def test_broker_behind_tls_is_reached_if_its_authority_is_known(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    plain = urlsplit(request.getfixturevalue("rabbit_url" if kind == "rabbitmq" else "valkey_url"))
    login = f"{plain.username}:{plain.password}@" if plain.username else ""
    scheme = "amqps" if kind == "rabbitmq" else "rediss+stream"
    with tls_front(plain.port or 0, tmp_path) as (port, certificate):
        url = f"{scheme}://{login}127.0.0.1:{port}/t{secrets.token_hex(8)}?timeout=5"
        with pytest.raises(BrokerError, match="certificate"):
            asyncio.run(connect(url).aopen())
        assert asyncio.run(send_and_receive(f"{url}&tls_ca={certificate}")) == 7


async def test_nats_takes_a_client_certificate_and_a_password(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    settings = (
        f'tls {{ cert_file: "{certificate}"; key_file: "{key}"; ca_file: "{certificate}"; verify: true }}\n'
        'authorization { user: "us@er"; password: "p/ss" }'
    )
    with NatsServer(limits=settings) as server:
        url = f"nats://us%40er:p%2Fss@127.0.0.1:{server.port}/payments?timeout=5&tls_ca={certificate}"
        with pytest.raises(BrokerError):
            await connect(url).aopen()
        url += f"&tls_cert={certificate}&tls_key={key}"
        with pytest.raises(BrokerError, match="Authorization"):
            await connect(url.replace("p%2Fss", "wrong")).aopen()
        assert await send_and_receive(url) == 7
