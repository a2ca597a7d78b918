"""The story, in errors, logs and observers."""

from __future__ import annotations

import pickle

from oncemore.client.errors import RetriesExhausted
from oncemore.client.httpx import RequestTimedOut
from oncemore.client.story import Attempt, RetryEvent, Story, notify
from oncemore.client.verdict import ACCEPTED, Fault, Verdict, judge_fault

TIMEOUT = judge_fault(Fault("timeout", note="initial timeout"), repeatable=True)
UNSENT = judge_fault(Fault("connection", sent=False), repeatable=True)
PROXY = Verdict(True, "5xx", "proxy error", "502", known="unknown", blame=True)
DONE = Verdict(False, "200", "success", "201")
REFUSED = Verdict(False, "4xx", "unauthorized", "401", known="refused")


def story(*verdicts: Verdict, delays: tuple[float, ...] = (0, 0.137, 0.281)) -> Story:
    attempts = [Attempt(n, d, 0.01, v) for n, (v, d) in enumerate(zip(verdicts, delays, strict=False), start=1)]
    return Story("api:443", "key-1", attempts)


def test_story_csv_has_the_columns_of_the_retry_log() -> None:
    assert story(TIMEOUT, PROXY, DONE).csv() == (
        "attempt,delay_ms,status,code,notes\n1,0,timeout,,initial timeout\n2,137,5xx,502,proxy error\n3,281,200,201,success\n"
    )


def test_what_is_known_is_never_more_than_was_seen() -> None:
    assert story().known == "not_performed"
    assert story(UNSENT, UNSENT).known == "not_performed"
    assert story(TIMEOUT).known == "unknown"
    assert story(TIMEOUT, UNSENT).known == "unknown"
    assert story(TIMEOUT, REFUSED).known == "unknown"
    assert story(REFUSED).known == "refused"
    assert story(TIMEOUT, DONE).known == "performed"
    assert story(ACCEPTED).known == "performed"
    assert story(TIMEOUT, Verdict(False, "5xx", "", known="refused", stored=True)).known == "refused"


def test_continued_operation_is_unknown_until_an_answer_tells() -> None:
    """An earlier call may have had it performed, and this one's credentials have expired."""
    for verdicts, known in [((), "unknown"), ((REFUSED,), "unknown"), ((UNSENT,), "unknown"), ((DONE,), "performed")]:
        told = story(*verdicts)
        told.continued = True
        assert told.known == known


def test_story_text_names_attempts_reason_and_outcome() -> None:
    told = story(TIMEOUT, PROXY)
    told.reason = "deadline"
    text = str(told)
    assert "initial timeout" in text
    assert "after 0.137 s: proxy error" in text
    assert "no time is left" in text
    assert "unknown" in text
    assert "nothing was sent" in str(story())


def test_errors_carry_the_story_through_pickling() -> None:
    error = pickle.loads(pickle.dumps(RequestTimedOut("late", story=story(TIMEOUT))))
    assert isinstance(error, RetriesExhausted)
    assert error.story == story(TIMEOUT)
    assert error.key == "key-1"
    assert RetriesExhausted("no story").key is None


def test_an_observer_that_fails_is_logged_and_harms_nobody(caplog: object) -> None:
    seen: list[RetryEvent] = []
    event = RetryEvent("retrying", story(TIMEOUT), 0.1)

    def fails(event: RetryEvent) -> None:
        raise RuntimeError("broken")

    notify([fails, seen.append], event)
    assert seen == [event]
    assert event.attempt == 1
    assert "An observer failed on retrying" in caplog.text  # type: ignore[attr-defined]
