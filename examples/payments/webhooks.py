"""The provider's webhooks: verified, then each handled once, however often it is delivered."""

from __future__ import annotations

from typing import Any

import msgspec

from oncemore import Inbox, Op
from oncemore.messages import Envelope
from oncemore.webhooks import Receiver
from oncemore.webhooks.schemes import Description, Pairs, StandardScheme

from . import ledger
from .unguarded import new_key

SOURCE = "provider"


def make_receiver(inbox: Inbox, secret: str, *, guarded: bool) -> Receiver:
    """Return the app that receives the provider's webhooks."""
    if guarded:
        return Receiver(inbox, "standard", secrets=[secret], handler=book, source=SOURCE)
    return Receiver(inbox, ForgetfulScheme([secret]), handler=book, source=SOURCE)


async def book(op: Op, event: Envelope) -> None:
    """Book a refund that succeeded; events of other types are acknowledged and remembered, and change nothing."""
    if event.type == "refund.succeeded":
        await ledger.settle_refund(op.connection, event.data["data"]["reference"])


class ForgetfulScheme(StandardScheme):
    """For the demo's service without a guard: each delivery has an id of its own, so a repeated event is handled again."""

    def describe(self, headers: Pairs, data: Any) -> Description:
        return msgspec.structs.replace(super().describe(headers, data), id=new_key())
