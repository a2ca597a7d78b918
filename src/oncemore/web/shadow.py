"""Shadow mode (`enforce=False`): requests pass untouched, and the ledger notes how each would have been answered."""

from __future__ import annotations

import copy
import dataclasses
import logging
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from .._contract.contract import Match
from .._contract.policy import Policy
from .._ledger.attempt import LeaseAttempt
from .._ledger.model import Lease, Operation, Outcome
from .._ledger.shadow import SHADOW, Verdict
from .._runtime.clock import SYSTEM
from .._runtime.plan import Call, Plan
from ..errors import Duplicate, InProgress, OncemoreError, StoreError, UnknownOutcome
from .door import Door
from .request import Request, check_length

log = logging.getLogger("oncemore.web")

LEASE = 30.0  # seconds, for the record of a verdict, which is settled immediately
PAUSE = 30.0  # seconds for which requests pass unobserved after the ledger has failed


class Shadow:
    """One request that is passed on untouched: call `begin` before the app, and `end` after it.

    Its records are separate from the records of enforced rules, and store only the status of the response.  Neither verb
    waits for another request or raises: errors of the ledger are logged.  Asking a ledger that is down takes until its
    timeout, so requests then pass unobserved for a while.
    """

    def __init__(self, door: Door[Any], match: Match) -> None:
        self.door = door
        self.match = match
        self.attempt: LeaseAttempt | None = None

    def begin(self, request: Request) -> Plan[None]:
        """Find out how *request* would be answered.  If not by performing it, report that: as an event, and in the ledger."""
        rule, door, now = self.match.rule, self.door, SYSTEM.monotonic()
        if now < door.unobserved_until:
            return
        if door.unobserved_until:
            door.unobserved_until = now + PAUSE  # only this request asks the ledger; the others pass for another while
        operation = Operation(SHADOW, "", name=rule.name)
        try:
            self.door.check(self.match, request.method, request.path, request.headers)
            check_length(rule, len(request.body))
            found, _ = yield from self.door.operation(self.match, request)
            if found is None:
                return
            operation = found
            verdict, code = yield from self._claim(found)
            door.unobserved_until = 0.0
        except StoreError as error:
            self._pause(error)
        except OncemoreError as error:
            yield from self._report(operation, "refused", error.code)
        except Exception:
            log.exception("In shadow mode, a request of %s passed unobserved because of an error", rule.name)
        else:
            if verdict is not None:
                yield from self._report(operation, verdict, code)

    def _claim(self, operation: Operation) -> Plan[tuple[Verdict | None, str]]:
        rule = self.match.rule
        shadowed = msgspec.structs.replace(operation, scope=f"{SHADOW}|{operation.scope}", unique=None, request=None)
        quiet = copy.copy(self.door.guard)
        quiet.observers = ()  # they are told of the verdict only, by `_report`
        attempt = LeaseAttempt(quiet, shadowed, shadow_policy(rule.policy))
        try:
            answer = yield from attempt.begin(0.0)
        except InProgress as error:
            return ("waited", "") if rule.policy.in_flight == "wait" else ("refused", error.code)
        except UnknownOutcome as error:
            return "held", error.code
        if answer is None:
            self.attempt = attempt
            return None, ""
        return ("refused", Duplicate.code) if rule.policy.on_duplicate == "reject" else ("replayed", "")

    def _report(self, operation: Operation, verdict: Verdict, code: str) -> Plan[None]:
        """Tell the observers, and write a record for `oncemore stats`."""
        guard = self.door.guard
        guard.emit("shadowed", operation, code=code, detail=verdict)
        noted = Operation(f"{SHADOW}|{verdict}", uuid.uuid4().hex, name=self.match.rule.name)
        try:
            lease = yield from guard.store.claim(noted, lease=LEASE)
            if isinstance(lease, Lease):
                retention = self.match.rule.policy.ttl
                yield from guard.store.settle(lease, Outcome("value"), retention=retention, audit=False, note=code)
        except StoreError as error:
            self._pause(error)
        except OncemoreError as error:
            log.warning("In shadow mode, a verdict of %s was not stored: %s", operation.name, error)

    def _pause(self, error: StoreError) -> None:
        self.door.unobserved_until = SYSTEM.monotonic() + PAUSE
        log.warning("The ledger fails, so requests pass unobserved for %.0f seconds: %s", PAUSE, error)

    def around(self, request: Request, perform: Callable[[], Any], status_of: Callable[[Any], int]) -> Plan[Any]:
        """Call `begin`, *perform* and `end`; return or raise the result of *perform*."""
        yield from self.begin(request)
        try:
            response = yield Call(perform)
        except GeneratorExit:
            self.drop()
            raise
        except BaseException:
            yield from self.end(None)
            raise
        try:
            status = status_of(response)
        except Exception:  # it is not a response, and the server will report that
            status = None
        yield from self.end(status)
        return response

    def drop(self) -> None:
        """Leave the attempt as it is, because the ledger cannot be asked any more: its lease lapses."""
        if self.attempt is not None:
            self.attempt.drop()

    def end(self, status: int | None) -> Plan[None]:
        """Record the *status* of the app's response; None means that the app raised."""
        if self.attempt is None:
            return
        try:
            if status is None:
                yield from self.attempt.release()
            else:
                yield from self.attempt.settle(Outcome("response", status))
        except GeneratorExit:
            self.attempt.drop()
            raise
        except StoreError as error:
            self._pause(error)
        except Exception as error:
            log.warning("In shadow mode, the end of %s could not be recorded: %s", self.match.rule.name, error)


@lru_cache(maxsize=256)
def shadow_policy(policy: Policy) -> Policy:
    """Return the policy under which requests are observed: nothing waits, and no resolver is called."""
    return dataclasses.replace(
        policy, effect="lease", in_flight="conflict", on_duplicate="replay", on_unknown="hold", resolver=None
    )
