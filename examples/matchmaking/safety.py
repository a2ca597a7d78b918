"""Reports, blocks and appeals.  The contract rejects a report or an appeal that was made before under another key."""

from __future__ import annotations

from typing import Any

from examples.sql import Row, rows

from .work import Work, new_id


async def file_report(work: Work, subject: str, category: str, text: str) -> Row:
    id = new_id("rep")
    insert = "INSERT INTO reports (id, reporter_id, subject_id, category, text) VALUES (?, ?, ?, ?, ?)"
    await work.rows(insert, id, work.user, subject, category, text)
    work.report("report.filed", id)
    return {"reportId": id}


async def block(work: Work, subject: str) -> Row:
    """Block a user.  If the user is already blocked, nothing changes."""
    insert = "INSERT INTO blocks (user_id, subject_id) VALUES (?, ?) ON CONFLICT DO NOTHING RETURNING subject_id"
    if await work.rows(insert, work.user, subject):
        work.report("user.blocked", subject)
    return {"subjectId": subject, "blocked": True}


async def list_blocks(connection: Any, user: str) -> list[str]:
    found = await rows(connection, "SELECT subject_id FROM blocks WHERE user_id = ? ORDER BY subject_id", user)
    return [row["subject_id"] for row in found]


async def file_appeal(work: Work, decision: str, text: str) -> Row:
    id = new_id("app")
    insert = "INSERT INTO appeals (id, user_id, decision_id, text) VALUES (?, ?, ?, ?)"
    await work.rows(insert, id, work.user, decision, text)
    work.report("appeal.filed", id)
    return {"appealId": id}
