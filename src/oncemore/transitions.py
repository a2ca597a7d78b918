"""Idempotent state changes of database rows: a table of allowed transitions, applied by one conditional UPDATE.

    offers = Transitions("match_offers", {("offered", "accept"): "accepted", ("offered", "pass"): "passed"})
    offers.apply(op, "offer-123", "accept")

An action that is applied twice has the result of the first time.  An action that the row's state does not allow raises
WrongState, which names both states.  The UPDATE runs in the operation's transaction (effect = "transaction"), so it
commits with the outcome.
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
    """The transitions that rows of *table* may make: `{(state, action): next state}`.

    *state* and *id* are the names of the columns.  Raise ConfigurationError for an action that would
    move a row two states further if it is applied twice, because a repeat must change nothing.
    """

    def __init__(
        self, table: str, steps: Mapping[tuple[str, str], str], *, state: str = "status", id: str = "id"
    ) -> None:
        for name in (table, state, id):
            check_name(name)
        if not steps:
            raise ConfigurationError("Transitions needs at least one transition: {(state, action): next state}")
        self.table = table
        self.state = state
        self.id = id
        self.steps = dict(steps)
        for _, action in steps:
            next_states = self.next_states(action)
            for after in next_states.values():
                if next_states.get(after, after) != after:
                    raise ConfigurationError(
                        f"{action!r} leads to {after!r}, and from there to {next_states[after]!r}, so a repeat would change "
                        "the row again: give the second transition another action"
                    )

    def apply(self, op: Op, id: Any, action: str, **columns: Any) -> Applied:
        """Change the state of the row *id* by *action*, and set *columns* in the same UPDATE.

        If the action was applied before, nothing is written, and `changed` is False.

        Raises:
            NoSuchRow: The table has no row *id*.
            WrongState: The action is not allowed in the row's state.
        """
        return run(self._apply(op, id, action, columns))

    async def aapply(self, op: Op, id: Any, action: str, **columns: Any) -> Applied:
        """Apply *action* to the row *id*: `apply` for async performers."""
        return await arun(self._apply(op, id, action, columns))

    def next_states(self, action: str) -> dict[str, str]:
        """Return `{state before: state after}` of *action*."""
        found = {before: after for (before, known), after in self.steps.items() if known == action}
        if not found:
            known = ", ".join(sorted({action for _, action in self.steps}))
            raise ConfigurationError(f"{self.table} has no action {action!r}: its actions are {known}")
        return found

    def _apply(self, op: Op, id: Any, action: str, columns: Mapping[str, Any]) -> Plan[Applied]:
        next_states = self.next_states(action)
        query = op.borrowed("Transitions.apply").query
        rows = yield from query(*self._update(id, next_states, columns))
        if rows:
            return Applied(rows[0][0], True)
        rows = yield from query(f"SELECT {self.state} FROM {self.table} WHERE {self.id} = $1", [id])
        if not rows:
            raise NoSuchRow(f"{self.table} has no row {id!r}")
        current: str = rows[0][0]
        if current in next_states.values():
            return Applied(current, False)
        allowed = " or ".join(sorted(next_states))
        raise WrongState(f"{id!r} in {self.table} is {current!r}; {action!r} needs {allowed!r}")

    def _update(self, id: Any, next_states: Mapping[str, str], columns: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """Return the UPDATE and its parameters.  It matches no row in a state that does not allow the action."""
        values: list[Any] = [id]

        def parameter(value: Any) -> str:
            values.append(value)
            return f"${len(values)}"

        cases = " ".join(f"WHEN {parameter(before)} THEN {parameter(after)}" for before, after in next_states.items())
        sets = [f"{self.state} = CASE {self.state} {cases} END"]
        for name, value in columns.items():
            check_name(name)
            sets.append(f"{name} = {parameter(value)}")
        states = ", ".join(parameter(before) for before in next_states)
        text = (
            f"UPDATE {self.table} SET {', '.join(sets)} WHERE {self.id} = $1 AND {self.state} IN ({states})"
            f" RETURNING {self.state}"
        )
        return text, values


def check_name(name: str) -> None:
    """Raise ConfigurationError unless *name* can stand in SQL unquoted: it is not passed as a parameter."""
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} cannot be the name of a table or column: use letters, digits and underscores"
        )
