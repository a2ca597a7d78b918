"""State changes of offers and matches on every driver."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import uuid
from collections.abc import Generator
from typing import Any

import pytest

from oncemore import Operation
from oncemore._ledger.context import Op
from oncemore._ledger.transactions import Do
from oncemore.errors import ConfigurationError, NoSuchRow, WrongState
from oncemore.transitions import Applied, Transitions

from .shops import Shop

# The seeds' table.
OFFERS = Transitions(
    "offers",
    {
        ("offered", "accept"): "accepted",
        ("offered", "pass"): "passed",
        ("offered", "not_now"): "not_now",
        ("accepted", "mutual accept"): "matched",
        ("matched", "unmatch"): "closed",
    },
)
CREATE = "CREATE TABLE offers (id text PRIMARY KEY, status text NOT NULL, reason text)"


def opened(shop: Shop, state: str = "offered") -> None:
    shop.execute(CREATE)
    shop.execute(f"INSERT INTO offers VALUES ('offer-123', '{state}', NULL)")


def state(shop: Shop) -> tuple[str, str | None]:
    [row] = shop.execute("SELECT status, reason FROM offers")
    return tuple(row)


async def act(shop: Shop, key: str, action: str, id: Any = "offer-123", **columns: Any) -> Applied:
    def perform(op: Op) -> Generator[Any, Any, Any]:
        applied = yield Do(
            lambda: OFFERS.apply(op, id, action, **columns), lambda: OFFERS.aapply(op, id, action, **columns)
        )
        return {"state": applied.state, "changed": applied.changed}

    answer = await shop.run(Operation("user-1", key, name="offers.act"), perform)
    return Applied(**answer.value)


async def test_the_same_action_twice_has_the_same_result(shop: Shop) -> None:
    opened(shop)
    assert await act(shop, "k1", "accept") == Applied("accepted", True)
    assert await act(shop, "k2", "accept") == Applied("accepted", False)
    assert state(shop) == ("accepted", None)


# What a row says is no matter of the driver: all of them on one driver of each kind, and in the other tests one on each.
ROWS = [(*step, after) for step, after in OFFERS.steps.items()]
EITHER = ["sqlite3", pytest.param("psycopg-async", marks=pytest.mark.server)]


@pytest.mark.parametrize("shop", EITHER, indirect=True)
@pytest.mark.parametrize(("before", "action", "after"), ROWS)
async def test_each_transition_of_the_table_applies(shop: Shop, before: str, action: str, after: str) -> None:
    opened(shop, before)
    assert await act(shop, "k1", action) == Applied(after, True)
    assert await act(shop, "k2", action) == Applied(after, False)
    assert state(shop)[0] == after


async def test_columns_change_only_with_the_state(shop: Shop) -> None:
    """A repeated `unmatch` of a closed match has the same result."""
    opened(shop, "matched")
    await act(shop, "k1", "unmatch", reason="unmatched")
    assert await act(shop, "k2", "unmatch", reason="again") == Applied("closed", False)
    assert state(shop) == ("closed", "unmatched")


async def test_transition_from_wrong_state_names_both_states(shop: Shop) -> None:
    opened(shop, "passed")
    with pytest.raises(WrongState, match=r"is 'passed'; 'accept' needs 'offered'"):
        await act(shop, "k1", "accept")
    assert state(shop) == ("passed", None)


async def test_transition_of_missing_row_says_so(shop: Shop) -> None:
    opened(shop)
    with pytest.raises(NoSuchRow, match="offer-9"):
        await act(shop, "k1", "accept", id="offer-9")


async def test_id_with_a_nul_is_not_cut_off(shop: Shop) -> None:
    """If the id were cut off at the NUL, it would name another offer, perhaps one that the caller may not accept."""
    opened(shop)
    with pytest.raises(Exception, match=r"NUL|0x00|no row"):
        await act(shop, "k1", "accept", id="offer-123\0")
    assert state(shop) == ("offered", None)


class Reason(str, enum.Enum):  # noqa: UP042 (as before there was a StrEnum)
    BORED = "bored"


async def test_value_is_written_as_the_driver_writes_it(shop: Shop) -> None:
    opened(shop, "matched")
    await act(shop, "k1", "unmatch", reason=Reason.BORED)
    assert state(shop) == ("closed", "bored")


async def test_ids_and_columns_may_have_any_driver_type(postgres_shop: Shop) -> None:
    shop, id = postgres_shop, uuid.uuid4()
    shop.execute("CREATE TABLE offers (id uuid PRIMARY KEY, status text NOT NULL, at date, price numeric, card bytea)")
    shop.execute(f"INSERT INTO offers VALUES ('{id}', 'matched')")
    day, price = datetime.date(2026, 11, 16), decimal.Decimal("9.90")
    await act(shop, "k1", "unmatch", id=id, at=day, price=price, card=b"\0%s'")
    assert shop.execute("SELECT status, at, price, card FROM offers") == [("closed", day, price, b"\0%s'")]


async def test_one_of_two_concurrent_actions_is_refused(shop: Shop) -> None:
    opened(shop)
    done = await asyncio.gather(act(shop, "k1", "accept"), act(shop, "k2", "pass"), return_exceptions=True)
    assert sorted(type(each).__name__ for each in done) == ["Applied", "WrongState"]


def test_invalid_transitions_are_refused_when_defined() -> None:
    with pytest.raises(ConfigurationError, match="cannot be the name of a table"):
        Transitions("offers; drop table offers", OFFERS.steps)
    with pytest.raises(ConfigurationError, match="at least one"):
        Transitions("offers", {})
    with pytest.raises(ConfigurationError, match="'next' leads to 'b', and from there to 'c'"):
        Transitions("offers", {("a", "next"): "b", ("b", "next"): "c"})
    Transitions("offers", {("a", "close"): "c", ("b", "close"): "c", ("c", "close"): "c"})
    with pytest.raises(ConfigurationError, match="its actions are accept"):
        OFFERS.next_states("explode")
