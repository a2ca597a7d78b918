"""Signing in, profiles, photos, compatibility responses and verification: one function for each change."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

from examples.sql import Row, rows
from oncemore.errors import Duplicate, InvalidPrincipal, WrongState

from .problems import Missing, WrongCode
from .work import Work, iso, new_id

CODE_LASTS, SESSION_LASTS = 600.0, 300.0  # seconds, equal to the `ttl` of the rules
PROFILE = {"displayName": "display_name", "bio": "bio", "timezone": "timezone"}  # field: column

# Signing in


async def send_code(work: Work, phone: str) -> Row:
    """Send a code to the phone.  Here the message is only a row; another program would pass it on to a provider."""
    request, code, ends = new_id("otp"), f"{secrets.randbelow(10**6):06}", work.now + CODE_LASTS
    await work.rows(
        "INSERT INTO codes (request_id, phone, code, expires_at) VALUES (?, ?, ?, ?)", request, phone, code, ends
    )
    work.report("otp.sent", request)
    return {"requestId": request, "expiresAt": iso(ends)}


async def verify_code(work: Work, request: str, code: str) -> Row:
    """Sign in by a code, which works once.  The first time, make the user."""
    used = await work.rows(
        "UPDATE codes SET status = 'used' WHERE request_id = ? AND code = ? AND status = 'sent' AND expires_at > ?"
        " RETURNING phone",
        *(request, code, work.now),
    )
    if not used:
        found = await work.rows("SELECT status FROM codes WHERE request_id = ? AND code = ?", request, code)
        if found and found[0]["status"] == "used":
            raise WrongState(f"The code of {request} was used before; ask for a new one")
        raise WrongCode("The code is wrong or too old; ask for a new one")
    phone = used[0]["phone"]
    insert = "INSERT INTO users (id, phone) VALUES (?, ?) ON CONFLICT (phone) DO NOTHING"
    await work.rows(insert, new_id("user"), phone)
    user: str = (await work.rows("SELECT id FROM users WHERE phone = ?", phone))[0]["id"]
    return {"userId": user, **await issue_tokens(work, user)}


async def issue_tokens(work: Work, user: str, session: str = "", *, reports: bool = True) -> Row:
    """Issue a pair of tokens, in a new session unless one is named."""
    if not session:
        session = new_id("ses")
        await work.rows("INSERT INTO sessions (id, user_id) VALUES (?, ?)", session, user)
    tokens = {"access": f"at_{secrets.token_urlsafe(24)}", "refresh": f"rt_{secrets.token_urlsafe(24)}"}
    for kind, token in tokens.items():
        await work.rows("INSERT INTO tokens (digest, session_id, kind) VALUES (?, ?, ?)", digest(token), session, kind)
    if reports:
        work.report("tokens.issued", session, user)
    return {"accessToken": tokens["access"], "refreshToken": tokens["refresh"]}


async def refresh(work: Work, token: str) -> Row:
    found = await find_session(work.connection, token, "refresh")
    if found is None:
        raise InvalidPrincipal("The refresh token is not known, or its session has ended; sign in again")
    return await issue_tokens(work, found["user_id"], found["id"])


async def log_out(work: Work, token: str) -> None:
    """Revoke the session of the access token."""
    found = await find_session(work.connection, token, "access")
    if found is None:
        raise InvalidPrincipal("The session has ended already")
    await work.rows("UPDATE sessions SET revoked = 1 WHERE id = ?", found["id"])
    work.report("session.revoked", found["id"])


async def find_session(connection: Any, token: str, kind: str) -> Row | None:
    """Return the session of a token, unless it is revoked."""
    found = await rows(
        connection,
        "SELECT s.id, s.user_id FROM tokens t JOIN sessions s ON s.id = t.session_id"
        " WHERE t.digest = ? AND t.kind = ? AND s.revoked = 0",
        *(digest(token), kind),
    )
    return found[0] if found else None


def digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


# Profiles


async def show_profile(connection: Any, user: str) -> Row:
    found = await rows(connection, "SELECT * FROM users WHERE id = ?", user)
    return {"id": user, **{name: found[0][column] for name, column in PROFILE.items()}}


async def change_profile(work: Work, fields: dict[str, str]) -> Row:
    """Set the fields that were sent: the last write wins."""
    for name, value in fields.items():
        await work.rows(f"UPDATE users SET {PROFILE[name]} = ? WHERE id = ?", value, work.user)
    if fields:
        work.report("profile.changed", work.user)
    return await show_profile(work.connection, work.user)


async def add_photo(work: Work, url: str, sha256: str) -> Row:
    made = await work.rows(
        "INSERT INTO photos (id, user_id, url, sha256) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (user_id, sha256) DO NOTHING RETURNING id",
        *(new_id("ph"), work.user, url, sha256),
    )
    if not made:
        raise Duplicate(f"You have a photo with the sha256 {sha256} already")
    work.report("photo.added", made[0]["id"])
    return {"photoId": made[0]["id"], "url": url, "sha256": sha256}


async def delete_photo(work: Work, id: str) -> None:
    if not await work.rows("DELETE FROM photos WHERE id = ? AND user_id = ? RETURNING id", id, work.user):
        raise Missing(f"You have no photo {id}")
    work.report("photo.deleted", id)


async def list_photos(connection: Any, user: str) -> list[Row]:
    found = await rows(connection, "SELECT id, url, sha256 FROM photos WHERE user_id = ? ORDER BY number", user)
    return [{"photoId": row["id"], "url": row["url"], "sha256": row["sha256"]} for row in found]


async def save_responses(work: Work, responses: dict[str, Any]) -> Row:
    """Overwrite the answers to these questions, and return all present answers."""
    for question, answer in sorted(responses.items()):  # sorted, so that two requests lock the rows in the same order
        await work.rows(
            "INSERT INTO responses (user_id, question, answer) VALUES (?, ?, ?)"
            " ON CONFLICT (user_id, question) DO UPDATE SET answer = excluded.answer",
            *(work.user, question, json.dumps(answer)),
        )
    if responses:
        work.report("responses.saved", work.user)
    return {"responses": await list_responses(work.connection, work.user)}


async def list_responses(connection: Any, user: str) -> Row:
    text = "SELECT question, answer FROM responses WHERE user_id = ? ORDER BY question"
    return {row["question"]: json.loads(row["answer"]) for row in await rows(connection, text, user)}


async def start_verification(work: Work, kind: str) -> Row:
    id, ends = new_id("ver"), work.now + SESSION_LASTS
    insert = "INSERT INTO verifications (id, user_id, kind, expires_at) VALUES (?, ?, ?, ?)"
    await work.rows(insert, id, work.user, kind, ends)
    work.report("verification.started", id)
    return {"sessionId": id, "expiresAt": iso(ends)}
