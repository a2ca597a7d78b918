"""The three CSV tables of the seeds, made by running the service, and compared with the seeds' own as data.

Names that a run makes up (keys, hashes, ids) are replaced by the seeds' in the order in which they appear; times are
judged by what the tables mean by them.
"""

from __future__ import annotations

import csv
from datetime import datetime
from typing import Any

import httpx

from oncemore import Retry
from oncemore.client.httpx import RetryTransport

from .conftest import Shop
from .front import front
from .test_refunds import payouts_of, refund, refunds_of, until

RETRY_LOG = """\
attempt,delay_ms,status,code,notes
1,0,timeout,,initial timeout
2,137,5xx,502,proxy error
3,281,200,201,success
"""
REPLAY_OUTCOMES = """\
key,payload_hash,status,http_code,result_id,notes
k1,abc,complete,201,rf_123,created
k1,abc,complete,201,rf_123,replayed
k1,xyz,conflict,409,,payload mismatch
"""
CONSUMER_INBOX = """\
event_id,source,first_seen,processed,result
ev_001,payments,2025-09-15T12:00:00Z,2025-09-15T12:00:03Z,ok
ev_001,payments,2025-09-15T12:00:05Z,2025-09-15T12:00:05Z,replayed
"""

Table = list[dict[str, str]]


def table(text: str) -> Table:
    return list(csv.DictReader(text.splitlines()))


def column(rows: Table, name: str) -> list[str]:
    return [row[name] for row in rows]


def renamed(made: Table, seed: Table, *names: str) -> Table:
    """*made* with its made-up names in the seeds' words: each new one is given the next new word of the seed's column."""
    rows = [dict(row) for row in made]
    for name in names:
        words = dict(zip(dict.fromkeys(column(made, name)), dict.fromkeys(column(seed, name)), strict=True))
        for row in rows:
            row[name] = words[row[name]]
    return rows


def test_the_client_retry_log(shop: Shop, name: str) -> None:
    """The first answer is lost after the refund was made, a proxy fails, the third attempt replays it."""
    charge = shop.captured(name)
    retry = Retry(attempts=5, deadline=20, attempt_timeout=3)
    with front(shop.service.url, "lose", 502) as url:
        headers = {"Authorization": "Bearer demo"}
        with httpx.Client(transport=RetryTransport(retry), base_url=url, headers=headers) as client:
            answer = client.post("/refunds", json={"charge_id": charge, "amount": 1000})
    made, seed = table(answer.extensions["oncemore"].csv()), table(RETRY_LOG)
    for name in ("attempt", "status", "code"):
        assert column(made, name) == column(seed, name)
    assert column(made, "notes")[2] == "success"
    bands = [(0, 0), (100, 200), (200, 400)]
    for rows in (made, seed):  # both keep to the schedule of the playbook
        delays = map(int, column(rows, "delay_ms"))
        assert all(low <= delay <= high for delay, (low, high) in zip(delays, bands, strict=True))
    assert refunds_of(shop, charge) == [answer.json()["id"]]
    assert len(payouts_of(shop, answer.json()["id"])) == 1


def outcome(shop: Shop, key: str, answer: httpx.Response) -> dict[str, str]:
    """A row of the replay table: what the caller was answered, and what the log says of it."""
    line = shop.logged(
        operation="refunds.create", idempotency_key=key, **{"x-request-id": answer.headers["x-request-id"]}
    )[-1]
    told: dict[str, Any] = answer.json()
    conflict = told.get("error_code", "").removeprefix("CONFLICT.idempotency.")
    return {
        "key": line["idempotency_key"],
        "payload_hash": line["payload_hash"],
        "status": "conflict" if conflict else "complete",
        "http_code": str(answer.status_code),
        "result_id": told.get("id", ""),
        "notes": conflict.replace("_", " ") or line["outcome"],
    }


def test_the_replay_outcomes(shop: Shop, name: str) -> None:
    charge, seed = shop.captured(name), table(REPLAY_OUTCOMES)
    made = [outcome(shop, name, refund(shop, charge, name, amount)) for amount in (1000, 1000, 2000)]
    assert renamed(made, seed, "key", "payload_hash", "result_id") == seed
    assert made[0]["result_id"].startswith("rf_")


def test_the_consumer_inbox(shop: Shop, name: str) -> None:
    made_id = refund(shop, shop.captured(name), name).json()["id"]

    def event() -> dict[str, Any]:
        events = shop.provider.get("/admin/events")["events"]
        return next(event for event in events if event["data"]["reference"] == made_id)

    until(lambda: len(event()["deliveries"]) == 1)
    shop.provider.replay(event()["id"], 1)
    made, seed = event()["answers"], table(CONSUMER_INBOX)
    assert [list(row) for row in made] == [list(row) for row in seed]
    for name in ("first_seen", "processed"):
        assert column(made, name) == sorted(column(made, name))
    for rows in (made, seed):
        first, second = ((read(row["first_seen"]), read(row["processed"])) for row in rows)
        assert first[0] <= first[1] <= second[0] <= second[1]
    kept = ("event_id", "source", "result")
    told = [{name: row[name] for name in kept} for row in made]
    wanted = [{name: row[name] for name in kept} for row in seed]
    assert renamed(told, wanted, "event_id", "source") == wanted


def read(text: str) -> datetime:
    return datetime.fromisoformat(text)
