"""One process of the load on a tiered store: asks for a few keys again and again, and writes the answers to a file."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import psycopg

from oncemore import Guard, Op, Operation, Policy
from oncemore.errors import OncemoreError


def ask_repeatedly(url: str, database: str, schema: str, keys: int, seconds: float, folder: str, number: int) -> None:
    """Ask for random keys for *seconds*.  Each effect is a row in *database*, and each answer is a line in a file.

    Even keys have `effect="transaction"`, and odd keys have `effect="lease"`.
    """
    guard = Guard(url, cache=0)
    policies = (Policy(effect="transaction", wait="20s"), Policy(lease="60s", wait="20s"))
    insert = f"INSERT INTO {schema}.effects (key, process) VALUES (%s, %s)"
    ends = time.monotonic() + seconds
    with Path(folder, f"answers-{number}").open("w") as answers, psycopg.connect(database, autocommit=True) as own:
        asked = 0
        while time.monotonic() < ends:
            asked += 1
            # Usually an old key, so that there is something to replay.
            key = str(random.randrange(min(keys, 1 + asked)))

            def perform(op: Op, key: str = key) -> str:
                connection = op.connection if int(key) % 2 == 0 else own
                connection.execute(insert, (key, number))
                return f"{key}-{op.lease.token}"

            try:
                answer = guard.run(Operation("load", key, f"f{key}"), perform, policy=policies[int(key) % 2])
            except OncemoreError as error:
                print(json.dumps([key, None, error.code]), file=answers)
                time.sleep(0.05)
            else:
                print(json.dumps([key, answer.outcome.body.decode("latin-1"), answer.how]), file=answers)
        print(json.dumps(["", "", str(guard.store.tiers.hits)]), file=answers)  # type: ignore[attr-defined]
    guard.close()
