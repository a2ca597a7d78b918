"""Tests of every middleware whose process is killed or frozen: cases 24 to 26.

Give a fixture `server` that serves the contract's app from a process of its own, on a ledger that outlives it, and a
fixture `second` that serves it on the same ledger.  They are marked `chaos`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from examples.process import Server

from .caller import Caller, refused, said

LEASE = 0.6  # seconds, as the rules for these cases say
UNKNOWN = "CONFLICT.idempotency.outcome_unknown"


@pytest.mark.chaos
class CrashCases:
    """A process that ends at the worst moment."""

    @pytest.fixture
    def caller(self, server: Server) -> Iterator[Caller]:
        with Caller(server.url) as caller:
            yield caller

    def killed_in_mid_handler(self, server: Server, caller: Caller, path: str) -> None:
        """Kill the server while its app performs, start it again, and let the lease lapse."""
        cut_off = caller.running(path)
        server.crash()
        with contextlib.suppress(httpx.TransportError):
            cut_off.result()
        server.start()
        caller.open()  # the app starts anew, and so do its counts and gates
        time.sleep(LEASE)

    def test_a_kill_in_mid_operation_leaves_the_outcome_unknown(self, server: Server, caller: Caller) -> None:
        """Nobody can know whether the effect happened, so nothing runs until the operation is resolved."""
        self.killed_in_mid_handler(server, caller, "/crash-hold/slow")
        for _ in range(2):
            assert refused(caller.ask("/crash-hold/slow"), 409, UNKNOWN)["retryable"] is False
        assert caller.runs == 0

    def test_killed_operation_runs_again_with_on_unknown_retry(self, server: Server, caller: Caller) -> None:
        self.killed_in_mid_handler(server, caller, "/crash-retry/slow")
        first, second = caller.ask("/crash-retry/slow"), caller.ask("/crash-retry/slow")
        assert (first.json()["attempt"], said(first), said(second)) == (2, "stored", "replayed")
        assert caller.runs == 1

    def test_resolver_decides_the_outcome_of_a_killed_operation(self, server: Server, caller: Caller) -> None:
        self.killed_in_mid_handler(server, caller, "/crash-resolve/slow")
        answer = caller.ask("/crash-resolve/slow")
        assert (answer.status_code, answer.text, said(answer)) == (201, "it had happened", "replayed")
        assert caller.runs == 0

    def test_killed_operation_is_in_progress_until_its_lease_ends(self, server: Server, caller: Caller) -> None:
        cut_off = caller.running("/default/slow")
        server.crash()
        with contextlib.suppress(httpx.TransportError):
            cut_off.result()
        server.start()
        answer = caller.ask("/default/slow", headers={"X-Request-Timeout": "0"})
        refused(answer, 409, "CONFLICT.idempotency.in_progress")
        assert caller.runs == 0

    def test_a_kill_after_the_outcome_was_stored_loses_nothing(self, server: Server, caller: Caller) -> None:
        first = caller.ask()
        server.restart()
        second = caller.ask()
        assert (second.content, said(second), caller.runs) == (first.content, "replayed", 0)

    def test_frozen_owner_gets_its_successors_outcome(self, server: Server, second: Server, caller: Caller) -> None:
        """The late owner's settle is refused, and its client gets the successor's outcome."""
        frozen = caller.running("/crash-retry/slow")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            time.sleep(LEASE)
            with Caller(second.url) as other:
                other.case, other.key, other.authorization = caller.case, caller.key, caller.authorization
                other.open()
                overtaken = other.ask("/crash-retry/slow")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        caller.open()
        late = frozen.result()
        assert (overtaken.json()["attempt"], said(overtaken)) == (2, "stored")
        assert (late.content, said(late)) == (overtaken.content, "replayed")
