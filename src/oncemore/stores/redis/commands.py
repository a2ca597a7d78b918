"""Carries the groups of one lane of a Redis store: packed by script and by address, sent again where that is safe."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import hiredis

from ..._runtime.backoff import Backoff
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan, Sleep
from ...errors import CorruptRecord, StoreError, StoreUnavailable
from .connection import Address, Exchange, HangUp, Line, Parcel, pack
from .scripts import Script
from .topology import Places

# How many items one script call carries: the server does nothing else meanwhile, so that is well under a millisecond.
CHUNK = 64
PAUSE = Backoff(base=0.02, cap=0.4)
LEAST = 0.05  # seconds; with less time left, another attempt is not worth it
AT_ONCE = 3  # rounds without a pause: an idle connection that was closed, a slot that moved, a script that was flushed

# Refusals by which nothing has happened.  Of these, another connection may be spared: it is no primary any more, its
# name may mean another server by now, or it wants a login that it did not want before.
STALE = {"READONLY", "MASTERDOWN", "CLUSTERDOWN", "NOAUTH"}
LATER = {"LOADING", "BUSY", "TRYAGAIN", *STALE}
UNWILLING = {"OOM", "MISCONF", "NOREPLICAS", "NOPERM"}

WITHIN_SCRIPT = re.compile(r"ERR Error running script .*: -([A-Z]+) ")

MOST_OWED = 1000

ASKING = pack("ASKING")


class TooFewReplicas(StoreUnavailable):
    """The primary has done what it was asked for, with this *answer*, but that does not count."""

    def __init__(self, detail: str, answer: Any) -> None:
        super().__init__(detail)
        self.answer = answer


class Item(NamedTuple):
    """One record's part in a call of *script*."""

    script: Script
    key: str
    args: tuple[Any, ...] = ()


class Plain(NamedTuple):
    """A command that is no script, for the primary with the number *server*."""

    words: tuple[Any, ...]
    server: int = 0


class Call:
    """One command on its way: a script with its items, or a plain one.  *error* is why it has to be sent again."""

    __slots__ = ("asking", "error", "full", "indexes", "items")

    def __init__(self, indexes: Sequence[int], items: Sequence[Any]) -> None:
        self.indexes = indexes
        self.items = items
        self.full = False  # the server has to be told the whole script
        self.asking: Address = None  # the node to which the slot is just moving
        self.error: StoreError | None = None

    def place(self, places: Places) -> Address:
        first = self.items[0]
        if isinstance(first, Plain):
            primaries = places.primaries()
            return primaries[first.server % len(primaries)]
        address: Address = self.asking or places.place(first.key)
        return address

    def packed(self, common: tuple[Any, ...]) -> bytes:
        first = self.items[0]
        if isinstance(first, Plain):
            return pack(*first.words)
        script = first.script
        words = [b"EVAL", script.source] if self.full else [b"EVALSHA", script.sha]
        words += (len(self.items), *[item.key for item in self.items], *common)
        for item in self.items:
            words += item.args
        return pack(*words)

    def answered(self, answer: Any, answers: list[Any]) -> bool:
        """Give each item its part of the answer; False where that is an error of the whole call."""
        if isinstance(answer, hiredis.ReplyError):
            return False
        if isinstance(self.items[0], Plain):
            answer = [answer]
        for index, own in zip(self.indexes, answer, strict=True):
            answers[index] = own if type(own) is not hiredis.ReplyError else refusal(own)
        return True

    def split(self) -> list[Call]:
        """A call for each item."""
        return [Call((index,), (item,)) for index, item in zip(self.indexes, self.items, strict=True)]


class Flights:
    """The connections of one lane.  *common* gives the arguments that every script call begins with.

    An item without an answer may have had its effect all the same.  Where *undo* makes an item that takes that back, it
    is owed, and flies ahead of the next group.
    """

    def __init__(
        self,
        places: Places,
        common: Callable[[], tuple[Any, ...]],
        *,
        timeout: float,
        replicas: int,
        undo: Callable[[Item], Item] | None = None,
    ) -> None:
        self.places = places
        self.common = common
        self.timeout = timeout
        self.replicas = replicas
        self.undo = undo
        self.owed: deque[Item] = deque(maxlen=MOST_OWED)  # in a long failure, those before were hardly ever sent
        self.lines: dict[Address, Line] = {}

    def line(self, address: Address) -> Line:
        return self.lines.get(address) or self.lines.setdefault(address, Line(self.places.dial, address))

    def fly(self, items: list[Any]) -> Plan[list[Any]]:
        """Each item's answer, or its own error."""
        owed = self._pay() if self.owed else []
        try:
            answers = yield from self._fly([*owed, *items] if owed else items)
        except BaseException:  # interrupted: nobody gets an answer
            self.owe([*owed, *items])
            raise
        return answers[len(owed) :] if owed else answers

    def owe(self, items: Sequence[Any]) -> None:
        """What has to be undone."""
        if self.undo is not None:
            self.owed.extend(self.undo(item) for item in items if type(item) is Item)

    def _pay(self) -> list[Any]:
        """What is owed, each once, also where several threads and loops fly at once."""
        owed: list[Any] = []
        with suppress(IndexError):
            while True:
                owed.append(self.owed.popleft())
        return owed

    def _fly(self, items: list[Any]) -> Plan[list[Any]]:
        ends = SYSTEM.monotonic() + self.timeout
        answers: list[Any] = [None] * len(items)
        left = list(calls(items, grouped=self.places.grouped))
        if self.places.grouped and self.places.known and not self.replicas:
            left = yield from self._straight(left, answers)
        if left:
            yield from Flight(self, answers, left).stay_up(ends)
        return answers

    def _straight(self, sent: list[Call], answers: list[Any]) -> Plan[list[Call]]:
        """Nearly every flight: one server, which answers all of it.  What it does not is left, and sent with more care."""
        common = self.common()
        packet = b"".join([call.packed(common) for call in sent])
        parcel = Parcel(self.line(self.places.place("")), packet, len(sent))
        (result,) = yield Exchange([parcel], self.timeout / 2)
        if isinstance(result, StoreError):
            self.places.known = False
            return sent
        return [call for call, answer in zip(sent, result, strict=True) if not call.answered(answer, answers)]

    def close(self) -> None:
        for line in tuple(self.lines.values()):
            line.close()

    async def aclose(self) -> None:
        for line in tuple(self.lines.values()):
            await line.aclose()


class Flight:
    """A group that needs more than one attempt, or more than one server.  *left* are the calls without an answer yet."""

    def __init__(self, flights: Flights, answers: list[Any], left: list[Call]) -> None:
        self.flights = flights
        self.places = flights.places
        self.answers = answers
        self.left = left
        self.lost = False  # the way has to be asked for before the next attempt

    def stay_up(self, ends: float) -> Plan[None]:
        """Send, and send again what has to be, until all is answered or the time is up."""
        rounds = 0
        while True:
            yield from self.round(max(LEAST, min(self.flights.timeout / 2, ends - SYSTEM.monotonic())))
            if not self.left:
                return
            rounds += 1
            pause = PAUSE.delay(rounds - AT_ONCE, random.random()) if rounds > AT_ONCE else 0.0
            if SYSTEM.monotonic() + pause + LEAST >= ends:
                for call in self.left:
                    self._fail([call], call.error or StoreUnavailable())
                return
            if pause:
                yield Sleep(pause)

    def round(self, patience: float) -> Plan[None]:
        """Send all that is left; what has to be sent once more is left again."""
        now, self.left = self.left, []
        try:
            if self.lost or not self.places.known:
                yield from self.places.locate(patience)
                self.lost = False
        except StoreError as error:
            self._later(now, error)
            return
        routed: dict[Address, list[Call]] = {}
        for call in now:
            routed.setdefault(call.place(self.places), []).append(call)
        results = yield Exchange([self._parcel(address, sent, patience) for address, sent in routed.items()], patience)
        for (address, sent), result in zip(routed.items(), results, strict=True):
            yield from self._unpack(self.flights.line(address), sent, result)

    def _parcel(self, address: Address, sent: list[Call], patience: float) -> Parcel:
        """One write, with an answer per call."""
        common = self.flights.common()
        packets = [call.packed(common) for call in sent]
        for number, call in reversed([*enumerate(sent)]):
            if call.asking:
                packets.insert(number, ASKING)
        if self.flights.replicas:
            packets.append(pack("WAIT", self.flights.replicas, int(patience * 800)))
        return Parcel(self.flights.line(address), b"".join(packets), len(packets))

    def _unpack(self, line: Line, sent: list[Call], result: list[Any] | StoreError) -> Plan[None]:
        if isinstance(result, StoreError):
            self._lose_way()
            for call in sent:
                call.asking = None
            self._later(sent, result)
            return
        short = self._short(result.pop()) if self.flights.replicas else None
        answers = iter(result)
        for call in sent:
            if call.asking:
                next(answers)
                call.asking = None
            answer = next(answers)
            if not call.answered(answer, self.answers):
                yield from self._failed(line, call, answer)
            elif short is not None:
                for index in call.indexes:
                    if not isinstance(self.answers[index], StoreError):
                        self.answers[index] = TooFewReplicas(short, self.answers[index])

    def _short(self, reached: int | hiredis.ReplyError) -> str | None:
        """What is wrong with the answer to WAIT, if anything is; a replica, and a user without the right, get an error."""
        if isinstance(reached, hiredis.ReplyError):
            return f"Redis does not wait for replicas: {reached}"
        wanted = self.flights.replicas
        return f"Only {reached} of {wanted} replicas have the write" if reached < wanted else None

    def _failed(self, line: Line, call: Call, error: hiredis.ReplyError) -> Plan[None]:
        """The whole call was refused: most often nothing happened and it can be sent again, in another way."""
        word, rest = kind(error), str(error).partition(" ")[2]
        again = [call]
        if word == "NOSCRIPT" and not call.full:
            call.full = True
        elif word in ("MOVED", "ASK"):
            self._redirect(call, word, rest, line.address)
        elif word in STALE:
            self._lose_way()
            yield HangUp(line)
        elif word not in LATER:
            if len(call.items) == 1:
                self.answers[call.indexes[0]] = refusal(error)
                return
            again = call.split()  # so that one bad item fails alone
        self._later(again, refusal(error))

    def _lose_way(self) -> None:
        """In a cluster, for this flight alone: the nodes of others may be well, and need not be asked for."""
        self.lost = True
        if self.places.grouped:
            self.places.known = False

    def _redirect(self, call: Call, word: str, rest: str, asked: Address) -> None:
        slot, _, place = rest.partition(" ")
        host, _, port = place.rpartition(":")
        address = (host or (asked[0] if asked else ""), int(port))
        if word == "ASK":
            call.asking = address
        else:
            self.places.move(int(slot), address)

    def _later(self, again: list[Call], error: StoreError) -> None:
        for call in again:
            call.error = error
        self.left += again

    def _fail(self, failed: list[Call], error: StoreError) -> None:
        """An error of its own for each item, so that callers who share a failure do not share a traceback."""
        for call in failed:
            self.flights.owe(call.items)
            for index in call.indexes:
                own = self.answers[index] = type(error)(error.detail)
                own.__cause__ = error.__cause__


def calls(items: list[Any], *, grouped: bool) -> Iterator[Call]:
    """The items of one script go together; but each alone in a cluster, where a call must keep to one slot."""
    together: dict[Script, list[int]] = {}
    for index, item in enumerate(items):
        if grouped and type(item) is Item:
            together.setdefault(item.script, []).append(index)
        else:
            yield Call((index,), (item,))
    for whole in together.values():
        for start in range(0, len(whole), CHUNK):
            part = whole[start : start + CHUNK]
            yield Call(part, [items[index] for index in part])


def kind(error: hiredis.ReplyError) -> str:
    """The word that says what is wrong; before Redis 7, an error within a script has it inside."""
    text = str(error)
    inside = WITHIN_SCRIPT.match(text)
    return inside[1] if inside else text.partition(" ")[0]


def refusal(error: hiredis.ReplyError) -> StoreError:
    """What an error that the server answered with is to the caller."""
    text, word = str(error), kind(error)
    failure: StoreError
    if word == "WRONGTYPE":
        failure = CorruptRecord("Something that is no record lies under this operation's key in Redis; remove it")
    elif word in LATER or word in UNWILLING:
        failure = StoreUnavailable(f"Redis refused: {text}")
    else:
        failure = StoreError(f"Redis failed: {text}")
    failure.__cause__ = error
    return failure
