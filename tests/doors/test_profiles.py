"""Every profile side by side, over HTTP; the page in the documentation is made from the same questions."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest

from oncemore._contract.profiles import PROFILES

SCRIPT = Path(__file__).parents[2] / "docs" / "_generate" / "profiles.py"

KEYS = """
profile     | guards                   | key header | no key         | unquoted | malformed | not a UUID | over 100 characters
default     | POST, PATCH              | KEY        | runs unguarded | accepted | 400       | accepted   | accepted
ietf        | POST, PATCH              | KEY        | runs unguarded | 400      | 400       | accepted   | accepted
stripe      | POST                     | KEY        | runs unguarded | accepted | 400       | accepted   | accepted
stripe-v2   | POST, DELETE             | KEY        | runs unguarded | accepted | 400       | accepted   | accepted
azure       | POST, PATCH, PUT, DELETE | REQUEST    | runs unguarded | accepted | REJECTED  | REJECTED   | REJECTED
zalando     | POST, PATCH              | KEY        | runs unguarded | accepted | 400       | accepted   | accepted
matchmaking | POST, PATCH, PUT, DELETE | KEY        | 400            | accepted | 400       | 400        | 400
patterns    | POST, PATCH              | KEY        | runs unguarded | accepted | 400       | accepted   | accepted
knowledge   | POST, PATCH              | KEY        | runs unguarded | accepted | 400       | accepted   | accepted
spring      | POST, PATCH              | KEY        | 400            | accepted | 400       | accepted   | 400
"""

REPEATS = """
profile     | the first response says | a repeat gets | another payload | another route     | while the first is running
default     | STORED                  | 201, REPLAYED | 409             | another operation | waits; then 409, AFTER 1
ietf        | STORED                  | 201, REPLAYED | 422             | another operation | 409, AFTER 1
stripe      | nothing                 | 201, STRIPE   | 400             | 400               | 409, AFTER 1
stripe-v2   | nothing                 | 201, STRIPE   | 400             | another operation | 409, AFTER 1
azure       | ACCEPTED                | 201, ACCEPTED | REJECTED        | another operation | 409, AFTER 1, REPEATABILITY rejected
zalando     | STORED                  | 201, REPLAYED | 400             | another operation | waits; then 409, AFTER 1
matchmaking | STORED                  | 201, REPLAYED | 409             | 409               | waits; then 409, AFTER 1
patterns    | STORED                  | 201, REPLAYED | 400             | another operation | waits; then 409, AFTER 1
knowledge   | STORED                  | 201, REPLAYED | 409             | another operation | 202, AFTER 1, `Location`
spring      | STORED                  | 201, REPLAYED | 409             | another operation | 409, AFTER 3
"""

FAILURES = """
profile     | a repeat after 500 | after 422    | after 402    | after 429  | kept for | a repeat after that
default     | runs again         | 422 replayed | 402 replayed | runs again | 1 d      | runs as new
ietf        | runs again         | 422 replayed | 402 replayed | runs again | 1 d      | runs as new
stripe      | 500 replayed       | 422 replayed | 402 replayed | runs again | 1 d      | runs as new
stripe-v2   | runs again         | runs again   | runs again   | runs again | 30 d     | runs as new
azure       | runs again         | 422 replayed | 402 replayed | runs again | 5 min    | 412, REPEATABILITY rejected
zalando     | 500 replayed       | 422 replayed | 402 replayed | runs again | 1 d      | runs as new
matchmaking | runs again         | 422 replayed | 402 replayed | runs again | 1 d      | runs as new
patterns    | runs again         | 422 replayed | 402 replayed | runs again | 1 d      | runs as new
knowledge   | runs again         | runs again   | runs again   | runs again | 1 d      | runs as new
spring      | 500 replayed       | 422 replayed | 402 replayed | runs again | 3 d      | runs as new
"""

SHORT = {
    "REQUEST": "`Repeatability-Request-ID`",
    "KEY": "`Idempotency-Key`",
    "REJECTED": "400, REPEATABILITY rejected",
    "STORED": "`Idempotency-Status: stored`",
    "REPLAYED": "`Idempotency-Status: replayed`",
    "STRIPE": "`Idempotent-Replayed: true`",
    "ACCEPTED": "REPEATABILITY accepted",
    "REPEATABILITY accepted": "`Repeatability-Result: accepted`",
    "REPEATABILITY rejected": "`Repeatability-Result: rejected`",
    "AFTER 1": "`Retry-After: 1`",
    "AFTER 3": "`Retry-After: 3`",
}


def read(table: str) -> dict[str, dict[str, str]]:
    """The rows of a table, with its abbreviations spelt out."""
    for short, meaning in SHORT.items():
        table = table.replace(short, meaning)
    head, *rows = [[cell.strip() for cell in line.split(" | ")] for line in table.strip().splitlines()]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize(("title", "expected"), [("Keys", KEYS), ("Repeats", REPEATS), ("Failures and time", FAILURES)])
def test_each_profile_does_what_the_table_says(script: dict[str, Any], title: str, expected: str) -> None:
    assert asyncio.run(script["answers"](script["TABLES"][title])) == read(expected)


@pytest.mark.parametrize("table", [KEYS, REPEATS, FAILURES])
def test_no_profile_is_left_out(table: str) -> None:
    assert list(read(table)) == list(PROFILES)


def test_the_page_in_the_documentation_is_current(script: dict[str, Any]) -> None:
    """If it is not, run: python docs/_generate/profiles.py"""
    assert script["PAGE"].read_text() == script["page"]()
