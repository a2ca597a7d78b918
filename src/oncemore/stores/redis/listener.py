"""Hears of other processes' writes: one connection and one thread per store, from the first claim on."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import hiredis

from ..._ledger.events import log
from ..._runtime.plan import run
from ..._runtime.wakeups import Id, Wakeups
from ...errors import StoreError
from .connection import INHERITED, TROUBLE, Wire, pack
from .topology import Places

QUIET = 10.0  # seconds after which a silent server is asked whether it is still there
PAUSE = 0.2  # between attempts to reach it
PING = pack("PING")


class Listener:
    """Notifies *wakeups* of every message on *channel*; after a loss it notifies all waiters, who then look themselves."""

    def __init__(self, places: Places, channel: str, wakeups: Wakeups) -> None:
        self.places = places
        self.channel = channel
        self.wakeups = wakeups
        self._reset()
        LISTENERS.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wire: Wire | None = None

    def start(self) -> None:
        """Listen from now on; harmless when it does already."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._listen, name="oncemore-redis", daemon=True)
                    try:
                        self._thread.start()
                    except RuntimeError:  # there is none left: those who wait look by themselves
                        self._thread = None

    def stop(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            wire = self._wire
        if wire is not None:
            wire.hang_up()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)

    def _listen(self) -> None:
        me, lost = threading.current_thread(), False
        while self._thread is me:
            try:
                if lost or not self.places.known:
                    run(self.places.locate(QUIET))
                self._hear(me)
            except hiredis.ReplyError as error:
                log.warning("Nobody may listen on %s, so those who wait look by themselves: %s", self.channel, error)
                return
            except (*TROUBLE, StoreError):
                lost = True
                if self._thread is me:
                    time.sleep(PAUSE)

    def _hear(self, me: threading.Thread) -> None:
        """Subscribe and pass on what comes, until the connection is lost or nobody listens any more."""
        wire = Wire(self.places.dial(random.choice(self.places.primaries()), False))
        try:
            with self._lock:
                self._wire = wire if self._thread is me else None
            wire.send(pack("SUBSCRIBE", self.channel), QUIET)
            while self._thread is me:
                for message in self._next(wire):
                    with suppress(RuntimeError, ValueError):  # a waiter's loop was just closed; a message is not ours
                        self._pass_on(message)
        finally:
            with self._lock:
                if self._wire is wire:  # and not the next thread's
                    self._wire = None
            wire.close()

    def _next(self, wire: Wire) -> list[Any]:
        """What has come; a server that is silent is asked for a sign of life, once."""
        try:
            return wire.receive(1)
        except TimeoutError:
            wire.send(PING, QUIET)
            return wire.receive(1)

    def _pass_on(self, message: list[Any] | hiredis.ReplyError) -> None:
        if isinstance(message, hiredis.ReplyError):
            raise message
        kind, *_, payload = message
        if kind == b"message":
            self.wakeups.notify(read_id(payload))
        elif kind == b"subscribe":  # what was said before has not been heard
            self.wakeups.notify_all()


def read_id(payload: bytes) -> Id:
    """The two parts of an id, from `<length of the scope>:<scope><key>`."""
    length, _, rest = payload.partition(b":")
    return rest[: int(length)].decode(), rest[int(length) :].decode()


# A forked child listens for itself, when it has someone who waits.
LISTENERS: weakref.WeakSet[Listener] = weakref.WeakSet()


def forget_listeners() -> None:
    for listener in tuple(LISTENERS):
        INHERITED.append(listener._wire)
        listener._reset()


os.register_at_fork(after_in_child=forget_listeners)
