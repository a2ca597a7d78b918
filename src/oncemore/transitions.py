"""Idempotent state changes: a table says which action leads from which state to which, and one conditional update does it.

    offers = Transitions("match_offers", {("offered", "accept"): "accepted", ("offered", "pass"): "passed"})
    offers.apply(op, "offer-123", "accept")

The same action twice has the same result.  An action that the state does not allow is refused, with both states named.
It works on the transaction that the operation has borrowed (effect = "transaction"), so it commits with the outcome.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ._ledger.context import Op
from ._runtime.plan import Plan, arun, run
from .errors import ConfigurationError, NoSuchRow, WrongState

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?", re.ASCII)


class Applied(msgspec.Struct, frozen=True):
    """The row's *state* after the action, and whether this call *changed* it."""

    state: str
    changed: bool


class Transitions:
    """The states of the rows of a *table*, and what leads from one to another: `{(state, action): next state}`."""

    def __init__(
        self, table: str, steps: Mapping[tuple[str, str], str], *, state: str = "status", id: str = "id"
    ) -> None:
        for name in (table, state, id):
            check_name(name)
        if not steps:
            raise ConfigurationError("A table of transitions needs one at least: {(state, action): next state}")
        self.table = table
        self.state = state
        self.id = id
        self.steps = dict(steps)
        for _, action in steps:
            leads = self.leads(action)
            for after in leads.values():
                if leads.get(after, after) != after:
                    raise ConfigurationError(
                        f"{action!r} leads to {after!r}, and from there on to {leads[after]!r}: done twice, it would not be the "
                        "same as once; give the second step a name of its own"
                    )

    def apply(self, op: Op, id: Any, action: str, **columns: Any) -> Applied:
        """Change the row's state by *action*, and set *columns* with it.  If that has been done before, nothing changes."""
        return run(self._applied(op, id, action, columns))

    async def aapply(self, op: Op, id: Any, action: str, **columns: Any) -> Applied:
        """Change the row's state as `apply` does, to be awaited."""
        return await arun(self._applied(op, id, action, columns))

    def leads(self, action: str) -> dict[str, str]:
        """From which states *action* leads to which."""
        found = {before: after for (before, known), after in self.steps.items() if known == action}
        if not found:
            known = ", ".join(sorted({action for _, action in self.steps}))
            raise ConfigurationError(f"{action!r} is no action of {self.table}; it knows {known}")
        return found

    def _applied(self, op: Op, id: Any, action: str, columns: Mapping[str, Any]) -> Plan[Applied]:
        leads = self.leads(action)
        query = op.borrowed("Transitions.apply").query
        rows = yield from query(*self._update(id, leads, columns))
        if rows:
            return Applied(rows[0][0], True)
        rows = yield from query(f"SELECT {self.state} FROM {self.table} WHERE {self.id} = $1", [id])
        if not rows:
            raise NoSuchRow(f"{self.table} has no row {id!r}")
        now: str = rows[0][0]
        if now in leads.values():
            return Applied(now, False)
        wanted = " or ".join(sorted(leads))
        raise WrongState(f"{id!r} in {self.table} is {now!r}; {action!r} needs {wanted!r}")

    def _update(self, id: Any, leads: Mapping[str, str], columns: Mapping[str, Any]) -> tuple[str, list[Any]]:
        values: list[Any] = [id]

        def given(value: Any) -> str:
            values.append(value)
            return f"${len(values)}"

        cases = " ".join(f"WHEN {given(before)} THEN {given(after)}" for before, after in leads.items())
        sets = [f"{self.state} = CASE {self.state} {cases} END"]
        for name, value in columns.items():
            check_name(name)
            sets.append(f"{name} = {given(value)}")
        states = ", ".join(given(before) for before in leads)
        text = (
            f"UPDATE {self.table} SET {', '.join(sets)} WHERE {self.id} = $1 AND {self.state} IN ({states})"
            f" RETURNING {self.state}"
        )
        return text, values


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no name of a table or column: write letters, digits and underscores")
