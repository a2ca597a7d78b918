"""Messages between services: each is sent with the effect that it tells of, and received once."""

from .broker import Broker
from .consumer import Consumer
from .envelope import Envelope
from .inbox import Inbox
from .outbox import Outbox
from .relay import Relay

__all__ = ["Broker", "Consumer", "Envelope", "Inbox", "Outbox", "Relay"]
