"""Messages between services: each commits with the change that it tells of, and is handled once."""

from .broker import Broker
from .consumer import Consumer
from .envelope import Envelope
from .inbox import Inbox
from .outbox import Outbox
from .relay import Relay

__all__ = ["Broker", "Consumer", "Envelope", "Inbox", "Outbox", "Relay"]
