"""The log tells the story of each operation, in fields that a collector finds and a line that a person reads."""

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
Told = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """The named fields of each record so far."""
    caplog.set_level(logging.DEBUG, logger.name)
    return lambda *names: [tuple(getattr(record, name) for name in names) for record in caplog.records]


def story(observer: Observer, *performers: Any, **settings: Any) -> None:
    """The refund is asked for as often as there are performers."""
    with closing(Guard("memory://", observers=[observer], policy=Policy(**settings))) as guard:
        for perform in performers:
            with suppress(RuntimeError):
                guard.run(REFUND, perform)


def fails(op: object) -> None:
    raise RuntimeError("the gateway timed out")


class TestFields:
    def test_the_first_is_created_and_the_second_replayed(self, told: Told) -> None:
        """CASES 16, and the playbook's oracle: {idempotency_key, outcome=replayed|created}."""
        story(log_events(logger), lambda op: CREATED, lambda op: CREATED)
        assert told("event", "idempotency_key", "outcome", "status", "from_state", "to_state") == [
            ("claimed", REFUND.key, "", 0, "absent", "running"),
            ("settled", REFUND.key, "created", 201, "running", "settled"),
            ("replayed", REFUND.key, "replayed", 201, "settled", "settled"),
        ]
        assert set(told("payload_hash", "operation", "scope")) == {("c1:aa", "refunds.create", REFUND.scope)}

    def test_attempts_are_counted_and_their_states_follow_each_other(self, told: Told) -> None:
        story(log_events(logger), fails, lambda op: CREATED)
        assert told("event", "attempt", "from_state", "to_state") == [
            ("claimed", 1, "absent", "running"),
            ("released", 1, "running", "released"),
            ("claimed", 2, "released", "running"),
            ("settled", 2, "running", "settled"),
        ]

    def test_a_takeover_is_told_with_a_warning(self, told: Told) -> None:
        with closing(Guard("memory://", observers=[log_events(logger)], policy=Policy(on_unknown="retry"))) as guard:
            run(guard.store.claim(REFUND, lease=0.001))
            guard.store.shift = 10.0
            guard.run(REFUND, lambda op: CREATED)
        assert told("event", "levelname", "from_state", "to_state")[:2] == [
            ("lapsed", "WARNING", "running", "lapsed"),
            ("claimed", "INFO", "lapsed", "running"),
        ]

    def test_a_refusal_is_told_with_its_code(self, told: Told) -> None:
        with closing(Guard("memory://", observers=[log_events(logger)])) as guard:
            guard.run(REFUND, lambda op: CREATED)
            with pytest.raises(PayloadMismatch):
                guard.run(Operation(REFUND.scope, REFUND.key, "c1:bb"), lambda op: CREATED)
        refused = ("refused", "CONFLICT.idempotency.payload_mismatch", "c1:bb", "")
        assert told("event", "error_code", "payload_hash", "outcome")[-1] == refused

    def test_a_state_that_the_event_says_is_believed(self, told: Told) -> None:
        log_events(logger)(Event(kind="settled", operation=REFUND, from_state="lapsed", to_state="held"))
        assert told("from_state", "to_state") == [("lapsed", "held")]

    def test_nothing_is_computed_where_nobody_listens(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING, logger.name)
        story(log_events(logger), lambda op: CREATED)
        assert caplog.records == []

    def test_a_logger_may_be_named(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "oncemore.events")
        story(log_events(), lambda op: CREATED)
        assert {record.name for record in caplog.records} == {"oncemore.events"}


class TestLine:
    def test_a_person_can_read_it(self, told: Told, caplog: pytest.LogCaptureFixture) -> None:
        story(log_events(logger), lambda op: CREATED)
        assert caplog.messages[-1] == (
            "settled operation='refunds.create' idempotency_key='refund:ch_9:1000' payload_hash='c1:aa' "
            "attempt=1 status=201 outcome='created' running→settled"
        )

    @given(key=st.text(min_size=1), detail=st.text())
    def test_no_key_can_begin_a_line_or_break_the_format(self, key: str, detail: str) -> None:
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
    def test_neither_key_nor_scope_can_be_read(self, told: Told, caplog: pytest.LogCaptureFixture) -> None:
        observer, twin = log_events(logger, keys="digest"), Operation(REFUND.scope, "another", REFUND.fingerprint)
        with closing(Guard("memory://", observers=[observer], policy=Policy(suspect="flag"))) as guard:
            for operation in (REFUND, REFUND, twin):
                guard.run(operation, lambda op: CREATED)
        assert ("suspected",) in told("event")
        everything = repr([vars(record) for record in caplog.records])
        for name in (REFUND.key, twin.key, REFUND.scope, "alice"):
            assert name not in everything

    def test_one_key_has_one_digest_by_which_its_lines_are_found(self, told: Told) -> None:
        story(log_events(logger, keys="digest"), fails, lambda op: CREATED)
        assert len(set(told("idempotency_key"))) == 1

    def test_a_stores_own_words_do_not_give_the_key_away(self, told: Told) -> None:
        failure = StoreUnavailable(f"could not write ({REFUND.scope}, {REFUND.key})")
        event = Event(kind="unstored", operation=REFUND, detail=failure.detail)
        log_events(logger, keys="digest")(event)
        log_events(logger)(event)
        digested, plain = told("detail", "levelname")
        assert REFUND.key not in digested[0]
        assert plain == (failure.detail, "ERROR")

    @pytest.mark.parametrize("quote", [str, repr])
    @pytest.mark.parametrize(
        ("scope", "key"),
        [("refunds:principal:ann", "ann"), ("ann", "principal:ann"), ('o\'neil \\ "x"', "a\nb'\"c"), ("s", "a")],
    )
    def test_nor_do_they_where_one_name_is_part_of_the_other_or_written_in_quotes(
        self, told: Told, scope: str, key: str, quote: Any
    ) -> None:
        detail = f"<{quote(key)}> <{quote(scope)}>"
        log_events(logger, keys="digest")(Event(kind="failed", operation=Operation(scope, key), detail=detail))
        [[shown]] = told("detail")
        digest = r"<['\"]?sha256:[0-9a-f]{32}['\"]?>"
        assert re.fullmatch(f"{digest} {digest}", shown)

    def test_with_a_secret_nobody_else_can_make_the_digest(self, told: Told) -> None:
        for secret in (b"", b"s" * 16, b"t" * 16):
            log_events(logger, keys="digest", secret=secret)(Event(kind="settled", operation=REFUND))
        assert len(set(told("idempotency_key"))) == 3

    @pytest.mark.parametrize("options", [{"keys": "hashed"}, {"secret": b"s"}])
    def test_options_that_mean_nothing_are_refused(self, options: Any) -> None:
        with pytest.raises(ConfigurationError):
            log_events(logger, **options)
