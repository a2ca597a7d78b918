"""Retries of plain functions and blocks, and the policy handed to other libraries."""

from __future__ import annotations

import asyncio
import functools
import time
from contextlib import suppress
from typing import Any

import pytest
import stamina
import tenacity

from oncemore._contract.keys import check_key, uuid7_time
from oncemore.client.deadlines import no_sleeping, now
from oncemore.client.errors import AttemptTimeout
from oncemore.client.function import retry, retrying
from oncemore.client.hosts import HOSTS, Budget
from oncemore.client.keys import derived_key, new_key, random_key
from oncemore.client.retry import Retry, stamina_arguments, tenacity_arguments
from oncemore.client.story import RetryEvent
from oncemore.errors import ConfigurationError, StoreUnavailable


class Flaky:
    """Fails so often, then returns its arguments."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls: list[Any] = []

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.calls.append((args, keywords))
        if self.errors:
            raise self.errors.pop(0)
        return args, keywords


def decorated(flaky: Flaky, *args: Any, awaited: bool = False, **settings: Any) -> Any:
    @retry(*args, **settings)
    def call(*args: Any, **keywords: Any) -> Any:
        """Its docstring."""
        return flaky(*args, **keywords)

    @retry(*args, **settings)
    async def acall(*args: Any, **keywords: Any) -> Any:
        await asyncio.sleep(0)
        return flaky(*args, **keywords)

    return (lambda *a, **k: asyncio.run(acall(*a, **k))) if awaited else call


@pytest.mark.parametrize("awaited", [False, True])
def test_a_function_is_called_again_until_it_succeeds(awaited: bool) -> None:
    flaky = Flaky(ConnectionError(), TimeoutError())
    with no_sleeping() as slept:
        assert decorated(flaky, awaited=awaited)(1, two=2) == ((1,), {"two": 2})
    assert len(flaky.calls) == 3
    assert [0.1 <= slept[0] <= 0.2, 0.2 <= slept[1] <= 0.4] == [True, True]


def test_last_error_of_a_function_is_not_its_own_cause() -> None:
    @retry(Retry(attempts=2))
    def fails() -> None:
        raise ConnectionError("gone")

    with no_sleeping(), pytest.raises(ConnectionError) as caught:
        fails()
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("awaited", [False, True])
def test_function_raises_its_last_error_with_story_note(awaited: bool) -> None:
    errors = [ConnectionError(str(number)) for number in range(3)]
    with no_sleeping(), pytest.raises(ConnectionError, match="2") as caught:
        decorated(Flaky(*errors), attempts=3, awaited=awaited)()
    assert "no attempts are left" in caught.value.__notes__[0]


@pytest.mark.parametrize("error", [KeyError("k"), KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()])
def test_error_that_is_not_chosen_is_raised_without_retry(error: BaseException) -> None:
    flaky = Flaky(error)
    with no_sleeping() as slept, pytest.raises(type(error)):
        decorated(flaky)()
    assert len(flaky.calls) == 1
    assert slept == []


def test_errors_may_be_named_or_judged_or_say_so_themselves() -> None:
    with no_sleeping():
        decorated(Flaky(KeyError("k")), errors=KeyError)()
        decorated(Flaky(OSError("busy")), errors=lambda error: "busy" in str(error))()
        decorated(Flaky(StoreUnavailable("down")))()
        with pytest.raises(OSError, match="gone"):
            decorated(Flaky(OSError("gone")), errors=lambda error: "busy" in str(error))()


def test_an_errors_own_retry_after_is_honoured() -> None:
    with no_sleeping() as slept:
        decorated(Flaky(StoreUnavailable("down", retry_after=2)))()
    assert 2 <= slept[0] <= 2.2


def test_the_deadline_cuts_an_async_function() -> None:

    @retry(Retry(deadline=0.2))
    async def hangs() -> None:
        await asyncio.sleep(30)

    begun = time.monotonic()
    with pytest.raises(AttemptTimeout, match="hangs"):
        asyncio.run(hangs())
    assert time.monotonic() - begun < 2


def test_cut_attempt_retries_but_own_timeout_is_judged() -> None:
    begun = []

    @retry(Retry(attempts=2, attempt_timeout=0.05, base=0.001, errors=()))
    async def hangs() -> None:
        begun.append(1)
        await asyncio.sleep(30)

    with pytest.raises(AttemptTimeout):
        asyncio.run(hangs())
    assert len(begun) == 2
    flaky = Flaky(TimeoutError())
    with pytest.raises(TimeoutError):
        decorated(flaky, errors=(), awaited=True)()
    assert len(flaky.calls) == 1


async def test_cancellation_ends_the_retries_immediately() -> None:
    calls = []

    @retry(Retry(base=10, cap=10, deadline=100))
    async def fails() -> None:
        calls.append(1)
        raise ConnectionError

    task = asyncio.create_task(fails())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(task), 1)
    assert len(calls) == 1


def test_a_sync_function_is_not_begun_again_after_the_deadline() -> None:
    flaky = Flaky(*[ConnectionError()] * 50)
    with no_sleeping() as slept, pytest.raises(ConnectionError):
        decorated(flaky, attempts=50, deadline=10, base=1, cap=2)()
    assert sum(slept) < 10


def test_the_decorated_function_keeps_its_name_and_its_docs() -> None:
    assert decorated(Flaky()).__doc__ == "Its docstring."
    assert retry(Flaky.__call__).__name__ == "__call__"
    with pytest.raises(TypeError, match="attempts"):
        retry(Retry(), attempts=3)


def test_function_key_is_same_in_every_attempt() -> None:
    flaky = Flaky(ConnectionError(), ConnectionError())
    with no_sleeping():
        call = decorated(flaky, key="idempotency_key")
        call("a")
        call("b")
        call("c", idempotency_key="mine")
    keys = [keywords["idempotency_key"] for _, keywords in flaky.calls]
    assert len(set(keys[:3])) == 1
    assert len(set(keys)) == 3
    assert keys[-1] == "mine"


def test_function_key_given_by_caller_is_kept() -> None:

    @retry(key="key")
    def pay(amount: int, key: str | None = None, *rest: int, **more: int) -> Any:
        return amount, key, rest, more

    assert pay(1, "own") == pay(1, key="own") == (1, "own", (), {})
    assert pay(1, "own", 3, four=4) == (1, "own", (3,), {"four": 4})
    assert uuid7_time(pay(1)[1]) is not None
    assert uuid7_time(pay(1, None)[1]) is not None


def test_a_key_that_the_function_does_not_take_is_named() -> None:
    with pytest.raises(ConfigurationError, match="kye"):
        retry(key="kye")(lambda key: key)
    assert retry(key="key")(lambda **options: options)()["key"]


def test_retry_accepts_partials_methods_and_callable_objects() -> None:
    flaky = Flaky(ConnectionError())

    class Awaited:
        async def __call__(self, number: int) -> Any:
            return flaky(number)

    with no_sleeping():
        assert retry(functools.partial(flaky, 1))() == ((1,), {})
        flaky.errors.append(ConnectionError())
        assert asyncio.run(retry(Awaited())(2)) == ((2,), {})


def test_what_cannot_be_tried_again_is_refused() -> None:
    """A generator's body runs after the call, and so does a coroutine that is only handed on."""

    def generator() -> Any:
        yield 1

    async def async_generator() -> Any:
        yield 1

    async def work() -> None: ...

    for function in (generator, async_generator):
        with pytest.raises(ConfigurationError, match="generator"):
            retry(function)
    with pytest.raises(ConfigurationError, match="async def"):
        retry(lambda: work())()
    for policy in (5, "5s"):
        with pytest.raises(ConfigurationError, match="Retry"):
            retry(policy)  # type: ignore[call-overload]
        with pytest.raises(ConfigurationError, match="Retry"):
            retrying(policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("several", [list, set, tuple])
def test_errors_may_be_named_in_any_collection(several: Any) -> None:
    flaky = Flaky(KeyError())
    with no_sleeping():
        assert decorated(flaky, errors=several([KeyError]))(1) == ((1,), {})
    with pytest.raises(ConfigurationError, match="errors"):
        Retry(errors=several([503]))


def test_functions_share_a_budget_only_if_they_name_a_host() -> None:
    budget = Budget(tokens=4, ratio=0)
    with no_sleeping():
        for _ in range(5):
            decorated(Flaky(ConnectionError()), budget=budget)()
        for expected in (2, 1, 1):
            flaky = Flaky(ConnectionError())
            with suppress(ConnectionError):
                decorated(flaky, budget=budget, host="a-database")()
            assert len(flaky.calls) == expected
    host = HOSTS.get("a-database", budget, None)
    assert host is not None
    assert host.tokens == 1


def test_observers_hear_of_functions_too() -> None:
    seen: list[RetryEvent] = []
    with no_sleeping():
        decorated(Flaky(ConnectionError()), observers=[seen.append])()
    assert [event.kind for event in seen] == ["retrying", "recovered"]
    assert seen[0].story.name.endswith("call")


def test_a_block_is_tried_again() -> None:
    flaky = Flaky(ConnectionError(), ConnectionError())
    numbers = []
    with no_sleeping() as slept:
        for attempt in retrying(Retry()):
            with attempt:
                numbers.append(attempt.number)
                assert 0 < attempt.remaining <= 10
                flaky()
    assert numbers == [1, 2, 3]
    assert len(slept) == 2


def test_the_same_attempts_may_be_made_again() -> None:
    policy, made = retrying(Retry()), []
    with no_sleeping():
        for number in range(2):
            for attempt in policy:
                with attempt:
                    made.append((number, attempt.number))
                    if attempt.number == 1:
                        raise ConnectionError
    assert made == [(0, 1), (0, 2), (1, 1), (1, 2)]


async def test_an_async_block_is_tried_again() -> None:
    flaky = Flaky(ConnectionError())
    with no_sleeping():
        async for attempt in retrying():
            with attempt:
                flaky()
    assert len(flaky.calls) == 2


def fail_in_a_block(error: BaseException, policy: Retry | None = None) -> None:
    for attempt in retrying(policy, name="fetching"):
        with attempt:
            raise error


@pytest.mark.parametrize("error", [KeyError("k"), KeyboardInterrupt()])
def test_a_block_lets_other_errors_through(error: BaseException) -> None:
    with pytest.raises(type(error)):
        fail_in_a_block(error)


def test_a_block_that_keeps_failing_raises_its_last_error() -> None:
    with no_sleeping(), pytest.raises(ConnectionError) as caught:
        fail_in_a_block(ConnectionError(), Retry(attempts=2))
    assert "fetching" in caught.value.__notes__[0]


def test_skipped_pauses_pass_on_the_clock() -> None:
    before = now()
    with no_sleeping() as slept:
        decorated(Flaky(ConnectionError()), base=50, cap=100, deadline=1000)()
    assert now() - before >= slept[0] >= 50


# Beside other libraries


def test_tenacity_keeps_our_policy() -> None:
    flaky = Flaky(ConnectionError(), ConnectionError())
    slept: list[float] = []
    arguments = tenacity_arguments(Retry())
    assert tenacity.retry(**arguments, sleep=slept.append)(flaky)(1) == ((1,), {})
    assert [0.1 <= slept[0] <= 0.2, 0.2 <= slept[1] <= 0.4] == [True, True]
    with pytest.raises(KeyError):
        tenacity.retry(**arguments)(Flaky(KeyError("k")))()
    flaky = Flaky(*[ConnectionError()] * 9)
    with pytest.raises(ConnectionError):
        tenacity.retry(**tenacity_arguments(Retry(attempts=4)), sleep=lambda seconds: None)(flaky)()
    assert len(flaky.calls) == 4
    flaky = Flaky(*[ConnectionError()] * 9)
    with pytest.raises(ConnectionError):
        tenacity.retry(**tenacity_arguments(Retry(base=11, cap=20, deadline=10)))(flaky)()
    assert len(flaky.calls) == 1


def test_a_schedule_is_kept_by_tenacity_and_refused_to_stamina() -> None:
    scheduled, flaky = Retry(attempts=3, schedule=("10ms", "30ms")), Flaky(*[ConnectionError("own")] * 9)
    with pytest.raises(ConnectionError, match="own"):
        tenacity.retry(**tenacity_arguments(scheduled))(flaky)()
    assert len(flaky.calls) == 3
    with pytest.raises(ConfigurationError, match="schedule"):
        stamina_arguments(scheduled)


def test_stamina_keeps_our_policy() -> None:
    flaky = Flaky(ConnectionError())
    pace = stamina_arguments(Retry(base=0.001, cap=0.01, jitter="additive", spread=0.001))
    assert stamina.retry(**pace)(lambda: flaky(1))() == ((1,), {})
    with pytest.raises(KeyError):
        stamina.retry(**pace)(lambda: Flaky(KeyError("k"))())()
    assert (pace["attempts"], pace["timeout"], pace["wait_jitter"]) == (5, 10, 0.001)
    assert stamina_arguments(Retry(jitter="none"))["wait_jitter"] == 0


# Keys


def test_new_keys_are_uuids_that_sort_by_time() -> None:
    first = new_key()
    time.sleep(0.002)
    assert check_key(first, format="uuid7") < new_key()
    assert abs((uuid7_time(first) or 0) - time.time()) < 1
    assert check_key(random_key(), format="uuid4")
    assert len({new_key() for _ in range(1000)}) == 1000


def test_a_derived_key_is_the_same_wherever_it_is_derived() -> None:
    assert derived_key("refund", "order-17") == "e022c6f7-e629-8e61-a56e-914f86135d46"
    assert derived_key("a:", "b") != derived_key("a", ":b")
    assert check_key(derived_key("refund", 17), format="uuid")


@pytest.mark.parametrize("parts", [(), ("",), (None,), (1.5,), (True,), (b"x",)])
def test_a_derived_key_needs_parts_that_mean_something(parts: Any) -> None:
    with pytest.raises(ConfigurationError):
        derived_key(*parts)
