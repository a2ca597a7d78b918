"""The states of a record and the transitions between them, in one table.

A record is stored as `running`, `settled`, `released` or `held`.  Two more states follow from the store's clock
(`model.state_of`): `absent` (there is no record, or its retention is over), and `lapsed` (running, but its lease is over).
"""

from __future__ import annotations

from typing import Literal

State = Literal["running", "settled", "released", "held"]
Verb = Literal["claim", "renew", "settle", "release", "hold", "resolve", "settle_as", "delete", "purge"]

RUNNING: State = "running"
SETTLED: State = "settled"
RELEASED: State = "released"
HELD: State = "held"

# From a state, by a verb, to a state.  A transition that is not in the table is refused, and changes nothing.
# A claim of a released or lapsed record needs the same fingerprint; renew, settle, release and hold need the token.
TRANSITIONS: dict[tuple[str, Verb], str] = {
    ("absent", "claim"): RUNNING,
    ("released", "claim"): RUNNING,
    ("lapsed", "claim"): RUNNING,  # a takeover: the token grows, and the policy's on_unknown decides
    ("running", "renew"): RUNNING,
    ("running", "settle"): SETTLED,
    ("running", "release"): RELEASED,
    ("running", "hold"): HELD,
    ("lapsed", "renew"): RUNNING,  # late, but nobody has taken over: the token is still the latest
    ("lapsed", "settle"): SETTLED,
    ("lapsed", "release"): RELEASED,
    ("lapsed", "hold"): HELD,
    ("settled", "settle"): SETTLED,  # sent again because the store's answer was lost: changes nothing
    ("released", "release"): RELEASED,
    ("held", "hold"): HELD,
    ("held", "resolve"): RELEASED,  # it did not happen: the next claim performs
    ("lapsed", "resolve"): RELEASED,
    ("held", "settle_as"): SETTLED,  # it happened, and this is the outcome
    ("lapsed", "settle_as"): SETTLED,
    ("settled", "delete"): "absent",
    ("released", "delete"): "absent",
    ("held", "delete"): "absent",
    ("lapsed", "delete"): "absent",
    ("absent", "purge"): "absent",  # a purge removes expired records, and no others
}


def follows(state: str, verb: Verb) -> str | None:
    """Return the state after *verb*, or None if *verb* is refused."""
    return TRANSITIONS.get((state, verb))
