"""Offers, matches and their messages: one function for each change.

An offer is answered by a conditional UPDATE (`Transitions`), so the same answer again changes nothing, and another answer is
refused.  Two users who accept at the same moment take turns by `Work.lock_pair`, so that the second one sees the first.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from examples.sql import Row, rows
from oncemore.errors import WrongState
from oncemore.transitions import Transitions
from oncemore.webhooks import Webhooks

from .problems import Missing
from .work import Work, iso, new_id

OFFERS = Transitions(
    "offers",
    {
        ("offered", "accept"): "accepted",
        ("offered", "pass"): "passed",
        ("offered", "not_now"): "not_now",
        ("accepted", "match"): "matched",
    },
)
MATCHES = Transitions("matches", {("open", "unmatch"): "closed"})
DAILY = 3  # candidates in a day's offers
EVENTS = uuid.UUID("9f0a9c0e-4c6b-4b0f-8f6e-2a4a4f6f2b11")  # the namespace of the ids of events

# Offers


async def answer_offer(work: Work, webhooks: Webhooks, id: str, action: str) -> Row:
    """Answer an offer of the user's; the second one of a pair to accept makes the match."""
    offer = await find_offer(work.connection, work.user, id)
    await work.lock_pair(work.user, offer["candidate_id"])
    offer = await find_offer(work.connection, work.user, id)
    if not (action == "accept" and offer["status"] == "matched"):  # it was accepted before
        applied = await OFFERS.aapply(work.guarded, id, action)
        if applied.changed:
            work.report("offer.answered", id)
            if action == "accept":
                await match_pair(work, webhooks, offer)
    now = await find_offer(work.connection, work.user, id)
    return {"offerId": id, "state": now["status"], "matchId": now["match_id"]}


async def match_pair(work: Work, webhooks: Webhooks, offer: Row) -> None:
    """Make the match and its event, if the candidate has accepted, too."""
    me, other = offer["user_id"], offer["candidate_id"]
    theirs = await work.rows(
        "SELECT id FROM offers WHERE user_id = ? AND candidate_id = ? AND status = 'accepted' ORDER BY number DESC LIMIT 1",
        *(other, me),
    )
    if not theirs:
        return
    users = sorted((me, other))
    made = await work.rows(
        "INSERT INTO matches (id, first_user, second_user) VALUES (?, ?, ?)"
        " ON CONFLICT (first_user, second_user) WHERE status = 'open' DO NOTHING RETURNING id",
        *(new_id("match"), *users),
    )
    if not made:  # an earlier pair of offers has made it
        select = "SELECT id FROM matches WHERE first_user = ? AND second_user = ? AND status = 'open'"
        made = await work.rows(select, *users)
    else:
        work.report("match.created", made[0]["id"])
        event = str(uuid.uuid5(EVENTS, made[0]["id"]))
        await webhooks.asend(work.guarded, "match.created", {"matchId": made[0]["id"], "users": users}, id=event)
    for each in (offer["id"], theirs[0]["id"]):
        await OFFERS.aapply(work.guarded, each, "match", match_id=made[0]["id"])


async def make_offer(connection: Any, user: str, candidate: str, date: str) -> str:
    id = new_id("offer")
    insert = "INSERT INTO offers (id, user_id, candidate_id, date) VALUES (?, ?, ?, ?)"
    await rows(connection, insert, id, user, candidate, date)
    return id


async def find_offer(connection: Any, user: str, id: str) -> Row:
    found = await rows(connection, "SELECT * FROM offers WHERE id = ? AND user_id = ?", id, user)
    if not found:
        raise Missing(f"You have no offer {id}")
    return found[0]


async def list_offers(connection: Any, user: str) -> list[Row]:
    found = await rows(connection, "SELECT * FROM offers WHERE user_id = ? ORDER BY number", user)
    return [offer_view(row) for row in found]


def offer_view(row: Row) -> Row:
    return {
        "offerId": row["id"],
        "candidateId": row["candidate_id"],
        "date": row["date"],
        "state": row["status"],
        "matchId": row["match_id"],
    }


async def generate_offers(work: Work, date: str, slot: str) -> list[str]:
    """Make the user's offers of a local date, and return their ids.  If the date has offers, return their ids."""
    if work.served:  # the user's row is the lock: two slots of one date, in two time zones, take turns
        await work.rows("SELECT id FROM users WHERE id = ? FOR UPDATE", work.user)
    made = await work.rows("SELECT offers FROM offer_days WHERE user_id = ? AND date = ?", work.user, date)
    if made:
        known: list[str] = json.loads(made[0]["offers"])
        return known
    # Users after this one in the order of ids come first, so that not all users get the same candidates.
    candidates = [*await find_candidates(work, "c.id > ?", DAILY)]
    candidates += await find_candidates(work, "c.id < ?", DAILY - len(candidates))
    ids = [await make_offer(work.connection, work.user, candidate, date) for candidate in candidates]
    insert = "INSERT INTO offer_days (user_id, date, slot, offers) VALUES (?, ?, ?, ?)"
    await work.rows(insert, work.user, date, slot, json.dumps(ids))
    work.report("offers.generated", slot)
    return ids


async def find_candidates(work: Work, which: str, most: int) -> list[str]:
    """Return the ids of users that *which* selects and who have no open match with the user, and no block."""
    found = await work.rows(
        f"SELECT c.id FROM users c WHERE {which}"
        " AND NOT EXISTS (SELECT 1 FROM matches m WHERE m.status = 'open'"
        "   AND ((m.first_user = ? AND m.second_user = c.id) OR (m.first_user = c.id AND m.second_user = ?)))"
        " AND NOT EXISTS (SELECT 1 FROM blocks b"
        "   WHERE (b.user_id = ? AND b.subject_id = c.id) OR (b.user_id = c.id AND b.subject_id = ?))"
        " ORDER BY c.id LIMIT ?",
        *([work.user] * 5),
        most,
    )
    return [row["id"] for row in found]


# Matches


async def find_match(connection: Any, user: str, id: str, lock: str = "") -> Row:
    text = f"SELECT * FROM matches WHERE id = ? AND (first_user = ? OR second_user = ?){lock}"
    found = await rows(connection, text, id, user, user)
    if not found:
        raise Missing(f"You have no match {id}")
    return found[0]


async def list_matches(connection: Any, user: str) -> list[Row]:
    text = "SELECT * FROM matches WHERE first_user = ? OR second_user = ? ORDER BY number"
    return [match_view(row) for row in await rows(connection, text, user, user)]


def match_view(row: Row) -> Row:
    users = [row["first_user"], row["second_user"]]
    return {"matchId": row["id"], "users": users, "state": row["status"], "reason": row["reason"]}


async def unmatch(work: Work, id: str) -> Row:
    """Close the match; if it is closed already, nothing changes."""
    await find_match(work.connection, work.user, id)
    applied = await MATCHES.aapply(work.guarded, id, "unmatch", reason="unmatched")
    if applied.changed:
        work.report("match.closed", id)
    return {"matchId": id, "state": applied.state, "reason": "unmatched"}


# Messages


async def send_message(work: Work, id: str, content: str, client_message_id: str) -> Row:
    """Add a message.  The contract recognises a repeat by its clientMessageId, so here it is new."""
    match = await find_match(work.connection, work.user, id, " FOR SHARE" if work.served else "")
    if match["status"] != "open":
        raise WrongState(f"The match {id} is closed, and takes no new message")
    message = new_id("msg")
    await work.rows(
        "INSERT INTO messages (id, match_id, sender_id, content, client_message_id, created_at) VALUES (?, ?, ?, ?, ?, ?)",
        *(message, id, work.user, content, client_message_id, work.now),
    )
    work.report("message.created", message)
    return message_view((await work.rows("SELECT * FROM messages WHERE id = ?", message))[0])


async def list_messages(connection: Any, user: str, id: str) -> list[Row]:
    await find_match(connection, user, id)
    found = await rows(connection, "SELECT * FROM messages WHERE match_id = ? ORDER BY number", id)
    return [message_view(row) for row in found]


def message_view(row: Row) -> Row:
    return {
        "messageId": row["id"],
        "matchId": row["match_id"],
        "senderId": row["sender_id"],
        "content": row["content"],
        "clientMessageId": row["client_message_id"],
        "createdAt": iso(row["created_at"]),
    }


async def mark_read(work: Work, id: str, message: str) -> Row:
    """Note that the user has read up to a message.  Read messages stay read, so an earlier message changes nothing."""
    await find_match(work.connection, work.user, id)
    found = await work.rows("SELECT number FROM messages WHERE id = ? AND match_id = ?", message, id)
    if not found:
        raise Missing(f"The match {id} has no message {message}")
    changed = await work.rows(
        "INSERT INTO reads (match_id, user_id, number, message_id) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (match_id, user_id) DO UPDATE SET number = excluded.number, message_id = excluded.message_id"
        " WHERE reads.number < excluded.number RETURNING number",
        *(id, work.user, found[0]["number"], message),
    )
    if changed:
        work.report("read.marked", message)
    mark = await work.rows("SELECT message_id FROM reads WHERE match_id = ? AND user_id = ?", id, work.user)
    return {"matchId": id, "readUpTo": mark[0]["message_id"]}
