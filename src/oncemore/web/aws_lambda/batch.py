"""Messages from SQS, each performed once: the answer names those that failed, and only they are delivered again."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from ..._contract.keys import check_key, check_name, join
from ..._contract.policy import Policy
from ..._contract.templates import Template, remembered
from ..._fingerprint.canonical import read_json
from ..._fingerprint.fingerprint import Fingerprinter
from ..._ledger.context import Op, running
from ..._ledger.guard import Guard, check_guard
from ..._ledger.model import Operation
from ..._runtime.plan import Call
from ...errors import ConfigurationError, Duplicate, InvalidPayload, OncemoreError, OutcomeNotKept
from .events import longest_wait, time_left, within

Message = dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])
Key = str | Callable[[Message], str]

log = logging.getLogger("oncemore.web")

# A queue keeps a message for 14 days at most, so its record must not expire sooner.  If another invocation works on the same
# message, this one does not wait: the message is delivered again.
DEFAULTS: dict[str, Any] = {"ttl": "14d", "in_flight": "conflict"}
SHORTEST = 1.0  # with less time left, no message is begun
DONE_BEFORE = (Duplicate, OutcomeNotKept)


def each_message(
    guard: Guard, *, key: Key | None = None, **settings: Any
) -> Callable[[Callable[[Message], Any]], Batch]:
    """A decorator: the function of one message, as a handler of SQS batches that reports partial failures.

    *key* names the operation: a template over the message (`"{body.orderId}"`, `"{header.MessageDeduplicationId}"` for
    its attributes), or a function of it; the message's own id unless given.  *settings* are those of `Policy`.
    """
    policy = check_guard(guard).policy.but(**{**DEFAULTS, **settings})
    return lambda function: Batch(guard, function, key, policy)


class Batch:
    """A Lambda handler that performs each message of a batch once."""

    def __init__(self, guard: Guard, function: Callable[[Message], Any], key: Key | None, policy: Policy) -> None:
        self.guard = guard
        self.function = check_plain(function)
        self.policy = policy
        self.key = key if key is None or callable(key) else remembered(Template(key), policy.ttl)
        self._fingerprinter = Fingerprinter()

    def __call__(self, event: Any, context: Any) -> dict[str, list[dict[str, str]]]:
        """Perform the messages of a batch; the answer has the ids of those that are to be delivered again."""
        failed: list[str] = []
        behind: set[str] = set()  # groups with a failed message, which their later ones must not overtake
        slowest = SHORTEST
        for message in messages_of(event):
            began, left, group = time.monotonic(), time_left(context), group_of(message)
            in_time = left is None or left > slowest
            if group in behind or not in_time or not self._perform(message, left):
                failed.append(message["messageId"])
                behind |= {group} - {""}
            slowest = max(slowest, time.monotonic() - began)
        return {"batchItemFailures": [{"itemIdentifier": id} for id in failed]}

    def operation(self, message: Message) -> Operation:
        """The operation that the message asks for."""
        queue, body = message["eventSourceARN"], message["body"].encode("utf-8", "surrogatepass")
        parts = ("SQS", queue, "", "application/json", body)
        return Operation(
            scope=join("sqs", queue),
            key=self._key(message, body),
            fingerprint=self._fingerprinter.fingerprint(*parts),
            name=f"sqs:{queue.rpartition(':')[2]}",
            matches=lambda stored: self._fingerprinter.matches(stored, *parts),
        )

    def _key(self, message: Message, body: bytes) -> str:
        if self.key is None:
            return check_key(message["messageId"])
        if not isinstance(self.key, Template):
            return check_name(self.key(message), "What the key function gave")
        sent = float(message["attributes"]["SentTimestamp"]) / 1000  # the present differs on every delivery
        return self.key.render(headers=attributes_of(message), body=document_of(body), now=sent)

    def _perform(self, message: Message, left: float | None) -> bool:
        """Perform the message; whether it is done, now or by an earlier delivery."""
        begun: list[Op] = []

        def perform(op: Op) -> None:
            begun.append(op)
            with running(op):
                Call(self.function, deepcopy(message)).run()  # if it is run again, it must get the message as it came

        try:
            operation, policy = self.operation(message), within(self.policy, left)
            answer = self.guard.run(operation, perform, policy=policy, wait=longest_wait(left))
        except Exception as error:
            if isinstance(error, DONE_BEFORE) and not begun:
                return True
            is_refusal = isinstance(error, OncemoreError)  # then nothing was done
            level, end = (logging.WARNING, "was refused") if is_refusal else (logging.ERROR, "failed")
            log.log(level, "The message %s %s", message["messageId"], end, exc_info=error)
            return False
        return answer.how != "released"  # if it was released, it counts as not performed


def check_plain(function: Function) -> Function:
    """The function; a ConfigurationError if it is async, because Lambda would not await it."""
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f"{function!r} is async, and Lambda calls plain functions: wrap it in one that calls asyncio.run(...)"
        )
    return function


def messages_of(event: Any) -> list[Message]:
    found = event.get("Records") if isinstance(event, dict) else None
    if not isinstance(found, list) or any(each.get("eventSource") != "aws:sqs" for each in found):
        raise ConfigurationError(
            "This function takes messages from SQS, and was given another event: connect it to SQS queues only"
        )
    return found


def group_of(message: Message) -> str:
    """The group within which messages keep their order; empty in a queue without order."""
    is_ordered = message["eventSourceARN"].endswith(".fifo")
    return message["attributes"].get("MessageGroupId", "") if is_ordered else ""


def document_of(body: bytes) -> Any:
    """The body if it is JSON, else None, in which a key's fields are missing."""
    try:
        return read_json(body)[0]
    except InvalidPayload:
        return None


def attributes_of(message: Message) -> dict[str, str]:
    """The message's attributes by their names in lower case; SQS's own count before the sender's."""
    sent = {name: given.get("stringValue") for name, given in (message.get("messageAttributes") or {}).items()}
    own = message.get("attributes") or {}
    return {name.lower(): value for name, value in {**sent, **own}.items() if value is not None}
