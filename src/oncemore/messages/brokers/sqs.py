"""`sqs://region/payments.fifo`: Amazon SQS.  A FIFO queue keeps the order of a subject and recognises repeated ids."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError  # type: ignore[import-untyped]

from ...errors import BrokerError, ConfigurationError
from ..broker import (
    PREFETCH,
    VISIBILITY,
    Address,
    BrokerDown,
    Delivery,
    Subscription,
    UrlBroker,
    deduplication_id,
    send_answer,
    wrap_error,
)
from ..envelope import Envelope, parse_structured, structured

OPTIONS = {"visibility": VISIBILITY, "endpoint": "", "profile": ""}
ERRORS = (BotoCoreError, ClientError)
THREADS = 8
FIFO_WINDOW = 300.0  # fixed by AWS
MOST_MESSAGES, MOST_BYTES = 10, 262_144  # in one request
LONGEST_POLL = 5  # seconds for which one request may wait for messages; added to the read time-out
LONGEST_DELAY = 43_200.0  # seconds; fixed by AWS
# Words in the codes of errors for which no message is at fault: too many requests, no queue, credentials, KMS keys.
FOR_NOW = ("Throttl", "OverLimit", "Queue", "AccessDenied", "Expired", "Token", "Signature", "Credential", "Kms")
NAME = re.compile(r"[0-9A-Za-z_-]{1,80}(\.fifo)?")
FIT = frozenset(string.ascii_letters + string.digits + string.punctuation)


class SqsBroker(UrlBroker):
    """A queue.  The credentials are from the URL, or found by boto3.

    A queue has one group: all consumers of the queue share its messages, whatever their group's name is.
    """

    def __init__(self, address: Address, settings: Mapping[str, Any]) -> None:
        if not NAME.fullmatch(address.channel):
            raise ConfigurationError(
                f"{address.channel!r} cannot name an SQS queue: use letters, digits, _ and -, and .fifo at the end to keep order"
            )
        if len(address.hosts) != 1:
            raise ConfigurationError(f"{address.url!r} names no region: write sqs://eu-central-1/{address.channel}")
        super().__init__(address, settings)
        self.fifo = address.channel.endswith(".fifo")
        self.window = FIFO_WINDOW if self.fifo else None
        self.visibility: float = address.options["visibility"]
        self._threads: ThreadPoolExecutor | None = None

    async def aopen(self) -> None:
        if self._threads is not None:
            return
        self._threads = ThreadPoolExecutor(THREADS, "oncemore-sqs")
        try:
            await self.call(self._find_or_create)
        except ERRORS as error:
            await self.aclose()
            raise wrap_error(self, f"Looking for the queue {self.channel!r} of", error) from error

    async def call(self, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Call a boto3 function on a thread."""
        if self._threads is None:
            raise BrokerError(f"{self.url} is closed")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *arguments, **more))

    def _find_or_create(self) -> None:
        address, options = self.address, self.address.options
        login: dict[str, Any] = {}
        if address.username:
            login = {"aws_access_key_id": address.username, "aws_secret_access_key": address.password}
        session = boto3.Session(profile_name=options["profile"] or None, region_name=address.hosts[0], **login)
        limits = Config(
            connect_timeout=options["timeout"],
            read_timeout=options["timeout"] + LONGEST_POLL,
            max_pool_connections=2 * THREADS,
            retries={"total_max_attempts": 1},  # relays and consumers try again by themselves
        )
        verify = {"verify": options["tls_ca"]} if options["tls_ca"] else {}
        self.sqs = session.client(
            "sqs", **{"endpoint_url": options["endpoint"] or None, "config": limits, **verify, **self.settings}
        )
        try:
            self.queue: str = self.sqs.get_queue_url(QueueName=self.channel)["QueueUrl"]
        except self.sqs.exceptions.QueueDoesNotExist:
            if not options["create"]:
                raise
            attributes = {"VisibilityTimeout": str(int(self.visibility))}
            if self.fifo:
                attributes["FifoQueue"] = "true"
            self.queue = self.sqs.create_queue(QueueName=self.channel, Attributes=attributes)["QueueUrl"]
        found = self.sqs.get_queue_attributes(QueueUrl=self.queue, AttributeNames=["VisibilityTimeout"])
        self.visibility = float(found["Attributes"]["VisibilityTimeout"])

    async def aclose(self) -> None:
        if self._threads is not None:
            threads, self._threads = self._threads, None
            threads.shutdown(wait=False, cancel_futures=True)

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        batches = make_batches([self._entry(number, envelope) for number, envelope in enumerate(envelopes)])
        results: dict[str, Exception | None] = {}
        if self.fifo:  # one batch after the other, to keep the order of subjects
            for batch in batches:
                results |= await self._send(batch)
        else:
            for some in await asyncio.gather(*map(self._send, batches)):
                results |= some
        return [results[str(number)] for number in range(len(envelopes))]

    def _entry(self, number: int, envelope: Envelope) -> dict[str, Any]:
        entry: dict[str, Any] = {"Id": str(number), "MessageBody": structured(envelope).decode()}
        if self.fifo:
            entry["MessageDeduplicationId"] = fit_id(deduplication_id(envelope, self.channel))
            # Without a subject, the message is alone in its group, so no other waits for it.
            entry["MessageGroupId"] = fit_id(envelope.subject or envelope.id)
        return entry

    async def _send(self, entries: list[dict[str, Any]]) -> dict[str, Exception | None]:
        try:
            answer = await self.call(self.sqs.send_message_batch, QueueUrl=self.queue, Entries=entries)
        except ERRORS as error:
            wrapped = wrap_error(self, "Publishing to", error)
            if is_for_now(error):
                wrapped = BrokerDown(wrapped.detail)
            return {entry["Id"]: wrapped for entry in entries}
        results: dict[str, Exception | None] = {each["Id"]: None for each in answer.get("Successful", ())}
        for each in answer.get("Failed", ()):
            detail = f"Publishing to {self.url} failed: {each.get('Code')} {each.get('Message', '')}"
            results[each["Id"]] = BrokerError(detail) if each.get("SenderFault", True) else BrokerDown(detail)
        return results

    def subscribe(self, group: str, *, prefetch: int = PREFETCH) -> Subscription:
        return SqsSubscription(self)


def is_for_now(error: Exception) -> bool:
    """Whether no message is at fault: SQS cannot be reached, has failed, or refuses our credentials."""
    if not isinstance(error, ClientError):
        return not isinstance(error, ParamValidationError)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = error.response.get("Error", {}).get("Code", "").rpartition(".")[2]  # without the prefix of some
    return status >= 500 or status in (401, 403, 429) or any(word in code for word in FOR_NOW)


def make_batches(entries: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Divide the entries into requests that SQS accepts.  An entry that is too large is alone in its request."""
    batches: list[list[dict[str, Any]]] = []
    size = MOST_BYTES
    for entry in entries:
        length = len(entry["MessageBody"].encode())
        if size + length > MOST_BYTES or len(batches[-1]) == MOST_MESSAGES:
            batches.append([])
            size = 0
        batches[-1].append(entry)
        size += length
    return batches


def fit_id(text: str) -> str:
    """Return the text, or its digest if SQS would not accept the text as an id."""
    if len(text) <= 128 and FIT.issuperset(text):
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class SqsSubscription(Subscription):
    """A subscription that polls the queue, and waits for messages in each request (long polling)."""

    def __init__(self, broker: SqsBroker) -> None:
        self.broker = broker

    async def aopen(self) -> None:
        await self.broker.aopen()
        self.visibility = self.broker.visibility

    async def receive(self, limit: int, wait: float) -> Sequence[Delivery]:
        await self.aopen()
        broker = self.broker
        try:
            answer = await broker.call(
                broker.sqs.receive_message,
                QueueUrl=broker.queue,
                MaxNumberOfMessages=min(limit, MOST_MESSAGES),
                WaitTimeSeconds=min(int(wait), LONGEST_POLL),
                AttributeNames=["ApproximateReceiveCount"],
            )
        except ERRORS as error:
            raise wrap_error(broker, "Receiving from", error) from error
        return [SqsDelivery(self, message) for message in answer.get("Messages", ())]

    async def answer(self, function: Callable[..., Any], receipt: str, **more: Any) -> None:
        """Call a boto3 function for a delivery."""
        call = self.broker.call(function, QueueUrl=self.broker.queue, ReceiptHandle=receipt, **more)
        await send_answer(self.broker, call, ERRORS)

    async def aclose(self) -> None:
        return


class SqsDelivery(Delivery):
    __slots__ = ("receipt", "subscription")

    def __init__(self, subscription: SqsSubscription, message: Mapping[str, Any]) -> None:
        raw = message["Body"].encode()
        count = int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1))
        super().__init__(lambda: parse_structured(raw), raw, count)
        self.subscription = subscription
        self.receipt: str = message["ReceiptHandle"]

    async def ack(self) -> None:
        await self.subscription.answer(self.subscription.broker.sqs.delete_message, self.receipt)

    async def nack(self, delay: float = 0.0) -> None:
        await self._set_visibility(delay)

    async def extend(self) -> None:
        await self._set_visibility(self.subscription.broker.visibility)

    async def _set_visibility(self, seconds: float) -> None:
        change = self.subscription.broker.sqs.change_message_visibility
        await self.subscription.answer(change, self.receipt, VisibilityTimeout=math.ceil(min(seconds, LONGEST_DELAY)))
