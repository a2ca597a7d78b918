"""Events as log records: their fields, their line, and digests in place of keys."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore import Guard, Operation, Outcome, Policy
from oncemore._ledger.events import Event, Observer
from oncemore._runtime.plan import run
from oncemore.errors import ConfigurationError, PayloadMismatch, StoreUnavailable
from oncemore.observe.logging import log_events

REFUND = Operation("refunds.create:principal:alice", "refund:ch_9:1000", "c1:aa", "refunds.create")
CREATED = Outcome("response", 201, body=b"rf_1")
logger = logging.getLogger("tests.observe")
Fields = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Fields:
    """A function that returns the named fields of each record that was logged."""
    caplog.set_level(logging.DEBUG, logger.name)
    return lambda *names: [tuple(getattr(record, name) for name in names) for record in caplog.records]


def refund(observer: Observer, *performers: Any, **settings: Any) -> None:
    """Request the refund once with each of the performers."""
    with closing(Guard("memory://", observers=[observer], policy=Policy(**settings))) as guard:
        for perform in performers:
            with suppress(RuntimeError):
                guard.run(REFUND, perform)


def fails(op: object) -> None:
    raise RuntimeError("the gateway timed out")


class TestFields:
    def test_first_request_is_created_and_second_replayed(self, logged: Fields) -> None:
        refund(log_events(logger), lambda op: CREATED, lambda op: CREATED)
        assert logged("event", "idempotency_key", "outcome", "status", "from_state", "to_state") == [
            ("claimed", REFUND.key, "", 0, "absent", "running"),
            ("settled", REFUND.key, "created", 201, "running", "settled"),
            ("replayed", REFUND.key, "replayed", 201, "settled", "settled"),
        ]
        assert set(logged("payload_hash", "operation", "scope")) == {("c1:aa", "refunds.create", REFUND.scope)}

    def test_failed_attempt_is_logged_with_number_and_states(self, logged: Fields) -> None:
        refund(log_events(logger), fails, lambda op: CREATED)
        assert logged("event", "attempt", "from_state", "to_state") == [
            ("claimed", 1, "absent", "running"),
            ("released", 1, "running", "released"),
            ("claimed", 2, "released", "running"),
            ("settled", 2, "running", "settled"),
        ]

    def test_takeover_is_logged_as_warning(self, logged: Fields) -> None:
        with closing(Guard("memory://", observers=[log_events(logger)], policy=Policy(on_unknown="retry"))) as guard:
            run(guard.store.claim(REFUND, lease=0.001))
            guard.store.shift = 10.0
            guard.run(REFUND, lambda op: CREATED)
        assert logged("event", "levelname", "from_state", "to_state")[:2] == [
            ("lapsed", "WARNING", "running", "lapsed"),
            ("claimed", "INFO", "lapsed", "running"),
        ]

    def test_refusal_is_logged_with_its_code(self, logged: Fields) -> None:
        with closing(Guard("memory://", observers=[log_events(logger)])) as guard:
            guard.run(REFUND, lambda op: CREATED)
            with pytest.raises(PayloadMismatch):
                guard.run(Operation(REFUND.scope, REFUND.key, "c1:bb"), lambda op: CREATED)
        refused = ("refused", "CONFLICT.idempotency.payload_mismatch", "c1:bb", "")
        assert logged("event", "error_code", "payload_hash", "outcome")[-1] == refused

    def test_states_of_the_event_come_first(self, logged: Fields) -> None:
        log_events(logger)(Event(kind="settled", operation=REFUND, from_state="lapsed", to_state="held"))
        assert logged("from_state", "to_state") == [("lapsed", "held")]

    def test_disabled_level_logs_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING, logger.name)
        refund(log_events(logger), lambda op: CREATED)
        assert caplog.records == []

    def test_default_logger_is_oncemore_events(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "oncemore.events")
        refund(log_events(), lambda op: CREATED)
        assert {record.name for record in caplog.records} == {"oncemore.events"}


class TestLine:
    def test_line_has_fields_and_transition(self, logged: Fields, caplog: pytest.LogCaptureFixture) -> None:
        refund(log_events(logger), lambda op: CREATED)
        assert caplog.messages[-1] == (
            "settled operation='refunds.create' idempotency_key='refund:ch_9:1000' payload_hash='c1:aa' "
            "attempt=1 status=201 outcome='created' running→settled"
        )

    @given(key=st.text(min_size=1), detail=st.text())
    def test_line_breaks_in_keys_are_escaped(self, key: str, detail: str) -> None:
        lines: list[str] = []

        class Kept(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())

        own = logging.Logger("own")
        own.addHandler(Kept())
        log_events(own)(Event(kind="unstored", operation=Operation("s", key), detail=detail))
        assert len(lines[0].splitlines()) == 1
        assert repr(key) in lines[0]


class TestDigests:
    def test_digests_hide_keys_and_scopes(self, logged: Fields, caplog: pytest.LogCaptureFixture) -> None:
        observer, twin = log_events(logger, keys="digest"), Operation(REFUND.scope, "another", REFUND.fingerprint)
        with closing(Guard("memory://", observers=[observer], policy=Policy(suspect="flag"))) as guard:
            for operation in (REFUND, REFUND, twin):
                guard.run(operation, lambda op: CREATED)
        assert ("suspected",) in logged("event")
        everything = repr([vars(record) for record in caplog.records])
        for name in (REFUND.key, twin.key, REFUND.scope, "alice"):
            assert name not in everything

    def test_digest_of_a_key_is_stable(self, logged: Fields) -> None:
        refund(log_events(logger, keys="digest"), fails, lambda op: CREATED)
        assert len(set(logged("idempotency_key"))) == 1

    def test_key_in_an_error_detail_is_replaced(self, logged: Fields) -> None:
        failure = StoreUnavailable(f"could not write ({REFUND.scope}, {REFUND.key})")
        event = Event(kind="unstored", operation=REFUND, detail=failure.detail)
        log_events(logger, keys="digest")(event)
        log_events(logger)(event)
        digested, plain = logged("detail", "levelname")
        assert REFUND.key not in digested[0]
        assert plain == (failure.detail, "ERROR")

    @pytest.mark.parametrize("quote", [str, repr])
    @pytest.mark.parametrize(
        ("scope", "key"),
        [("refunds:principal:ann", "ann"), ("ann", "principal:ann"), ('o\'neil \\ "x"', "a\nb'\"c"), ("s", "a")],
    )
    def test_quoted_or_overlapping_names_in_detail_are_replaced(
        self, logged: Fields, scope: str, key: str, quote: Any
    ) -> None:
        detail = f"<{quote(key)}> <{quote(scope)}>"
        log_events(logger, keys="digest")(Event(kind="failed", operation=Operation(scope, key), detail=detail))
        [[shown]] = logged("detail")
        digest = r"<['\"]?sha256:[0-9a-f]{32}['\"]?>"
        assert re.fullmatch(f"{digest} {digest}", shown)

    def test_secret_changes_the_digest(self, logged: Fields) -> None:
        for secret in (b"", b"s" * 16, b"t" * 16):
            log_events(logger, keys="digest", secret=secret)(Event(kind="settled", operation=REFUND))
        assert len(set(logged("idempotency_key"))) == 3

    @pytest.mark.parametrize("options", [{"keys": "hashed"}, {"secret": b"s"}])
    def test_contradictory_options_are_refused(self, options: Any) -> None:
        with pytest.raises(ConfigurationError):
            log_events(logger, **options)
