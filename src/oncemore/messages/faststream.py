"""A middleware for FastStream: its subscribers then handle each message once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from faststream import BaseMiddleware, StreamMessage

from .._ledger.context import Op, running
from .._runtime.plan import arun
from ..errors import ConfigurationError
from .inbox import Inbox

PREFIXES = ("ce-", "ce_")  # of CloudEvents headers: the first on NATS and RabbitMQ, the second on Kafka


class InboxMiddleware:
    """Calls a subscriber once for each message, and returns the first call's value for a repeated message.

        broker = NatsBroker(middlewares=[InboxMiddleware(inbox)])

    The subscriber's effects commit with the inbox's record if it uses `oncemore.current_operation().connection`.  Ids
    and sources are read from CloudEvents headers; if your messages have none, pass `id` and `source`.

    Args:
        inbox: Records the handled messages.
        source: The sender of all messages; by default their header `ce-source` (on Kafka, `ce_source`).
        id: Returns the sender's id of a message; by default its header `ce-id` (on Kafka, `ce_id`).
        delivery: Returns the broker's count of deliveries, if the broker counts them.
    """

    def __init__(
        self,
        inbox: Inbox,
        *,
        source: str | None = None,
        id: Callable[[StreamMessage[Any]], str] | None = None,
        delivery: Callable[[StreamMessage[Any]], int] | None = None,
    ) -> None:
        self.inbox = inbox
        self.source = source
        self.id = id
        self.delivery = delivery

    def __call__(self, message: Any, /, *, context: Any) -> BaseMiddleware:
        """Make the middleware of one message; FastStream calls this."""
        return ReceivedMessage(message, context=context, settings=self)

    def name_of(self, message: StreamMessage[Any]) -> tuple[str, str]:
        """Return the sender's id of the message, and the sender."""
        id = attribute(message, "id") if self.id is None else self.id(message)
        source = attribute(message, "source") if self.source is None else self.source
        if not id or not source:
            raise ConfigurationError(
                f"A message has no header {'ce-source' if id else 'ce-id'!r}: send it as a CloudEvent, or pass source= and id=, "
                "as in InboxMiddleware(inbox, source='payments', id=lambda message: message.headers['x-id'])"
            )
        return str(id), str(source)


def attribute(message: StreamMessage[Any], name: str) -> Any:
    """Return a CloudEvents attribute of the message; None if the message does not have it."""
    found = (message.headers.get(prefix + name) for prefix in PREFIXES)
    return next((value for value in found if value), None)


class ReceivedMessage(BaseMiddleware):
    def __init__(self, message: Any, /, *, context: Any, settings: InboxMiddleware) -> None:
        super().__init__(message, context=context)
        self.settings = settings

    async def consume_scope(
        self, call_next: Callable[[StreamMessage[Any]], Awaitable[Any]], msg: StreamMessage[Any]
    ) -> Any:
        settings = self.settings
        inbox = settings.inbox
        id, source = settings.name_of(msg)

        async def handle(op: Op, body: bytes) -> Any:
            with running(op):
                return await call_next(msg)

        count = 1 if settings.delivery is None else settings.delivery(msg)
        body = msg.body if isinstance(msg.body, bytes) else bytes(msg.body)
        received = await arun(inbox.received(inbox.operation(id, source, body), body, handle, count))
        return received.value
