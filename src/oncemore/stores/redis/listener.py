"""Wakes the waiters of this process if other processes change records: one subscription and one thread per store."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any

import redis

from ..._ledger.events import log
from ..._runtime.listening import CannotListen, Listener
from ..._runtime.plan import run
from ..._runtime.wakeups import Id, Wakeups
from .commands import reply_text
from .topology import Topology

QUIET = 10.0  # seconds after which a silent server is asked whether it is still there, and then may take to answer


class RedisListener(Listener[Any]):
    """Notifies *wakeups* of every message on *channel*; and all waiters after each subscription, as messages were missed."""

    name = "oncemore-redis"

    def __init__(self, topology: Topology, channel: str, wakeups: Wakeups) -> None:
        super().__init__()
        self.topology = topology
        self.channel = channel
        self.wakeups = wakeups
        self._heard_at = 0.0  # the time of the server's last message
        self._pinged = False  # since then

    def connect(self) -> Any:
        """A redis-py PubSub that is subscribed."""
        run(self.topology.locate(QUIET))  # the primary may be another server by now
        pubsub = self.topology.pool.connector.pubsub(random.choice(self.topology.primaries()), QUIET)
        try:
            pubsub.subscribe(self.channel)
            if pubsub.get_message(timeout=QUIET) is None:
                raise redis.TimeoutError("the server does not answer")
        except redis.ResponseError as error:
            pubsub.close()
            log.warning("This user may not listen on %s, so waiters poll instead: %s", self.channel, reply_text(error))
            raise CannotListen(str(error)) from error
        except BaseException:
            pubsub.close()
            raise
        self._heard_at, self._pinged = time.monotonic(), False
        self.wakeups.notify_all()
        return pubsub

    def receive(self, connection: Any, seconds: float) -> None:
        """Handle the next message, if one comes.  Raises redis.TimeoutError if the server seems to be gone."""
        message: dict[str, Any] | None = connection.get_message(timeout=min(seconds, QUIET))
        now = time.monotonic()
        if message is not None:
            self._heard_at, self._pinged = now, False
            if message["type"] == "message":
                with suppress(RuntimeError, ValueError):  # a waiter's loop was just closed, or the message is not ours
                    self.wakeups.notify(read_id(message["data"]))
        elif now - self._heard_at > 2 * QUIET:
            raise redis.TimeoutError("the server does not answer")
        elif now - self._heard_at > QUIET and not self._pinged:
            connection.ping()
            self._pinged = True


def read_id(payload: bytes) -> Id:
    """The two parts of an id, from `<length of the scope>:<scope><key>`."""
    length, _, rest = payload.partition(b":")
    return rest[: int(length)].decode(), rest[int(length) :].decode()
