"""The runs of a keyring in a ledger that are under way in this process: each has a lease, which is renewed meanwhile."""

from __future__ import annotations

from contextlib import suppress

from ..._ledger.heartbeat import Beat, Heartbeat, LoopBeats, ThreadBeats, end
from ..._ledger.model import Lease
from ..._ledger.store import Store
from ..._runtime.clock import SYSTEM
from ..._runtime.forks import reset_in_child
from ..._runtime.plan import Plan
from ...errors import Fenced, StoreError
from ..story import log
from .entry import Entry, check_reuse
from .letters import give_back


class Run:
    """An operation at work in this process: its lease, kept alive by *beat*, and its letter as it is in the ledger."""

    __slots__ = ("beat", "lease", "letter")

    def __init__(self, lease: Lease, beat: Beat, letter: Entry) -> None:
        self.lease = lease
        self.beat = beat
        self.letter = letter


class Runs:
    """By the token of their entries; what was adopted can also be found by its scope and key, to be sent."""

    def __init__(self, store: Store, lease: float) -> None:
        self.store = store
        self.lease = lease
        self.heart = Heartbeat(self._renew, SYSTEM)
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self.by_token: dict[int, Run] = {}
        self.adopted: dict[tuple[str, str], list[int]] = {}
        self._unsent: set[Lease] = set()

    def begin(self, lease: Lease, letter: Entry, token: int, *, adopted: bool = False) -> Plan[None]:
        """From now on, the lease is renewed."""
        run = self.by_token[token] = Run(lease, self.heart.beat(lease, self.lease), letter)
        if adopted:
            self.adopted.setdefault((letter.scope, letter.key), []).append(token)
        yield Pulse(self.heart, run.beat)

    def end(self, entry: Entry) -> Plan[Run | None]:
        """The entry's run, whose lease is renewed no longer; None where it is not under way here."""
        run = self.by_token.pop(entry.token, None)
        if run is not None:
            self._disown(entry, entry.token)
            yield Pulse(self.heart, run.beat, over=True)
        return run

    def take_adopted(self, entry: Entry) -> Run | None:
        """A run that was adopted for such an entry; from now on it goes by this one's token."""
        for token in tuple(self.adopted.get((entry.scope, entry.key), ())):
            run = self.by_token.get(token)
            if run is not None:
                check_reuse(run.letter, entry)
                run = self.by_token.pop(token, None)  # None: another thread was quicker
            if run is not None:
                self._disown(run.letter, token)
                self.by_token[entry.token] = run
                return run
        return None

    def _disown(self, entry: Entry, token: int) -> None:
        tokens = self.adopted.get((entry.scope, entry.key), [])
        with suppress(ValueError):
            tokens.remove(token)
        if not tokens:
            self.adopted.pop((entry.scope, entry.key), None)

    def give_back(self, lease: Lease) -> Plan[None]:
        """Release a run that sends nothing.  Where the ledger fails, that goes on in the background: its caller is told that
        nothing was sent, but the letter may have been written, and somebody would resume it."""
        if not (yield from give_back(self.store, lease)):
            self._unsent.add(lease)
            yield Pulse(self.heart, self.heart.beat(lease, self.lease))

    def _renew(self, beat: Beat) -> Plan[None]:
        try:
            if beat.lease not in self._unsent:
                yield from self.store.renew(beat.lease, lease=beat.seconds)
                return
            yield from self.store.release(beat.lease, retention=0.0)
        except StoreError as error:  # the next beat tries again
            log.info("A claim on the keyring could not be renewed: %s", error)
            return
        except Fenced:
            pass
        self._unsent.discard(beat.lease)
        beat.lost = True

    def close(self) -> None:
        """End the thread; what is under way lapses."""
        self.heart.close()


class Pulse:
    """Keep a run's lease alive from now on, or no longer (*over*): by a thread, or by the loop it runs on."""

    __slots__ = ("beat", "heart", "over")

    def __init__(self, heart: Heartbeat, beat: Beat, *, over: bool = False) -> None:
        self.heart = heart
        self.beat = beat
        self.over = over

    def run(self) -> None:
        self._change(self.heart.threads)

    async def arun(self) -> None:
        self._change(self.heart.on_loop())

    def _change(self, beats: ThreadBeats | LoopBeats) -> None:
        if self.over:
            end(beats.beats, (self.beat,))
        else:
            beats.add((self.beat,))
