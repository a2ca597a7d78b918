"""Broker URLs: channels, spaces, options, credentials, and errors that name the correction."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from oncemore.errors import BrokerError, ConfigurationError
from oncemore.messages.broker import connect, deduplication_id, parse_address
from oncemore.messages.brokers import kafka, nats, rabbitmq, redis_streams, sqs
from oncemore.messages.envelope import Envelope


@pytest.mark.parametrize(
    ("url", "space", "channel"),
    [
        ("amqp://host/vhost/payments", "vhost", "payments"),
        ("amqp://host/payments", "", "payments"),
        ("amqp://host/%2F/payments", "/", "payments"),
        ("redis+stream://host/3/payments", "3", "payments"),
        ("kafka://h1,h2:9093/payments", "", "payments"),
        ("sqs://eu-central-1/payments.fifo", "", "payments.fifo"),
        ("memory://payments", "", "payments"),
        ("memory://", "", "from-the-outbox"),
        ("nats://host", "", "from-the-outbox"),
        ("nats://host/", "", "from-the-outbox"),
    ],
)
def test_last_segment_is_the_channel(url: str, space: str, channel: str) -> None:
    address = parse_address(url, {}, "from-the-outbox")
    assert (address.space, address.channel) == (space, channel)


def test_credentials_and_hosts_are_read_and_the_password_is_hidden() -> None:
    address = parse_address("kafka://us%40er:se%2Fcret@h1,[::1]:99/payments?group=g&timeout=3&tls=true", {})
    assert (address.username, address.password) == ("us@er", "se/cret")
    assert address.host_and_port(9092) == [("h1", 9092), ("::1", 99)]
    assert (address.options["group"], address.options["timeout"], address.tls() is not None) == ("g", 3.0, True)
    assert "cret" not in address.url


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("nats://host", "names no channel: add it at the end"),
        ("mqtt://host/payments", "names no broker; known are memory://, nats://"),
        ("payments", "names no broker"),
        ("amqp://host/a/b/payments", "too many parts"),
        ("nats://host/payments?grup=x", "grup= in the broker's URL is unknown; known are create"),
        ("nats://host/payments?create=maybe", "in the broker's URL: write true or false"),
        ("nats://host/pay.ments", "cannot name a NATS stream"),
        ("sqs://eu-central-1/pay.ments", "cannot name an SQS queue"),
        ("sqs:///payments", "names no region"),
        ("nats://host/prod/payments", "write nats://host/payments"),
        ("kafka://host/prod/payments", "write kafka://host/payments"),
        ("redis+stream://host/prod/payments", "'prod' is not the number of a database"),
        ("redis+stream://h1,h2/payments", "names several hosts"),
    ],
)
def test_wrong_url_is_refused_with_the_correction(url: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        connect(url)


def test_object_that_is_not_a_broker_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is not a broker"):
        connect(object())  # type: ignore[arg-type]
    broker = connect("memory://payments")
    assert connect(broker) is broker


@pytest.mark.parametrize(
    ("driver", "url", "extra"),
    [
        ("nats", "nats://h/c", "nats"),
        ("aio_pika", "amqp://h/c", "rabbitmq"),
        ("confluent_kafka", "kafka://h/c", "kafka"),
        ("redis", "redis+stream://h/c", "redis"),
        ("boto3", "sqs://h/c", "sqs"),
    ],
)
def test_missing_driver_names_the_command_that_installs_it(driver: str, url: str, extra: str) -> None:
    code = f"import sys; sys.modules[{driver!r}] = None\nfrom oncemore.messages.broker import connect; connect({url!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"pip install 'oncemore[{extra}]'" in ran.stderr


@pytest.mark.parametrize("url", ["nats://127.0.0.1:1/c", "amqp://127.0.0.1:1/c", "redis+stream://127.0.0.1:1/c"])
async def test_unreachable_broker_is_an_error_for_each_message(url: str) -> None:
    broker = connect(f"{url}?timeout=1")
    with pytest.raises(BrokerError, match=r"127\.0\.0\.1:1"):
        await broker.aopen()
    message = Envelope("refund.succeeded", 1, id="a", source="payments")
    results = await broker.publish([message, message])
    assert [type(each) for each in results] == [BrokerError, BrokerError]
    await broker.aclose()


def test_deduplication_ids_of_two_sources_differ() -> None:
    own = Envelope("t", 1, id="1", source="payments")
    other = Envelope("t", 1, id="1", source="orders")
    assert deduplication_id(own, "payments") == "1"
    assert deduplication_id(other, "payments") != "1"
    assert sqs.fit_id("x" * 200) != sqs.fit_id("x" * 201)
    assert len(sqs.fit_id("ž")) == 64


def test_type_with_odd_characters_gives_a_valid_nats_subject() -> None:
    assert nats.subject_of("payments", "refund.succeeded") == "payments.refund.succeeded"
    assert nats.subject_of("payments", ".a b..*>.") == "payments._a_b_.___"


def test_options_of_each_broker_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "brokers.md").read_text()
    for module in (nats, rabbitmq, kafka, redis_streams, sqs):
        assert [option for option in module.OPTIONS if option not in page] == []
