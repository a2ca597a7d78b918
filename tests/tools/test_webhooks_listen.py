"""`oncemore webhooks listen`, asked over a socket."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from ..support.processes import Program
from ..webhooks.senders import OTHER, SECRET, SENDERS
from .command import oncemore


@contextmanager
def listening(*words: str, **environment: str) -> Iterator[tuple[Program, str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "oncemore.tools.cli", "webhooks", "listen", "--port", "0", *words]
    with Program(command, stdout=pipe, stderr=pipe, env={**os.environ, **environment}) as program:
        try:
            assert program.stderr is not None
            said = ""
            while "http://" not in said:
                line = program.stderr.readline()
                assert line, said
                said += line
            yield program, said
        finally:
            program.kill()


def url_in(said: str) -> str:
    found = re.search(r"http://[\d.:]+", said)
    assert found is not None
    return found[0]


def test_listen_prints_events_duplicates_and_refusals() -> None:
    sender = SENDERS["stripe"]
    body = sender.body("evt_1", note="\x1b[31m")
    with listening("--scheme", "stripe", "--secret", SECRET, "--count", "3") as (program, said):
        headers = [sender.headers(body), sender.headers(body), sender.headers(body, secret=OTHER)]
        answers = [httpx.post(url_in(said), content=body, headers=each) for each in headers]
        out, _ = program.communicate(timeout=60)
    assert [each.status_code for each in answers] == [200, 200, 401]
    first, *rest = [line for line in out.splitlines() if re.match(r"\d{3} ", line)]
    assert first == "200 ok evt_1 refund.succeeded"
    assert rest[0] == "200 replayed evt_1"
    assert rest[1].startswith("401 No signature matches")
    assert '"amount": 1000' in out
    assert "\x1b" not in out  # a sender must not be able to write to the terminal


def test_listen_makes_a_secret_and_prints_json() -> None:
    sender = SENDERS["standard"]
    body = sender.body()
    with listening("--count", "1", "--json") as (program, said):
        secret = re.search(r"whsec_\S+", said)
        assert secret is not None
        httpx.post(url_in(said), content=body, headers=sender.headers(body, secret=secret[0]))
        out, _ = program.communicate(timeout=60)
    shown = json.loads(out)
    assert (shown["status"], shown["id"], shown["type"]) == (200, "ev_1", "refund.succeeded")


def test_listen_takes_secrets_from_the_environment_and_options() -> None:
    sender = SENDERS["hmac"]
    body = sender.body()
    words = ["--scheme", "hmac", "--option", "id_header=X-Event-Id", "--count", "1"]
    with listening(*words, ONCEMORE_WEBHOOK_SECRETS=f"{OTHER} {SECRET}") as (_, said):
        assert httpx.post(url_in(said), content=body, headers=sender.headers(body)).status_code == 200


def test_listen_refuses_settings_that_cannot_work() -> None:
    assert "needs the secret" in oncemore("webhooks", "listen", "--scheme", "stripe").err
    assert "name=value" in oncemore("webhooks", "listen", "--option", "header").err
    assert oncemore("webhooks", "listen", "--scheme", "hmac", "--secret", "x").code == 2
