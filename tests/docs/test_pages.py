"""Every code block in README and documentation runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncemore._contract.contract import Contract
from oncemore._contract.policy import Policy
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation, Outcome
from oncemore._runtime.plan import run
from tests.client.server import Server, answer, performed
from tests.support.processes import run_to_end, without_coverage

from .pages import BLOCKS, ROOT, Block, commands

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
LANGUAGES = {"python", "toml", "console", "bash", "json", "sql", "http", "text", "mermaid", "javascript", "ini"}
COMMANDS = ("oncemore ", "pip install ", "make ", "git ")
# The number of blocks that cannot run; a new one needs a good reason in the comment before it.
NOT_RUN = 1

# Addresses on pages, which the tests replace by those of local servers.
API, FLAKY = "https://api.example.com", "https://flaky.example.com"
POSTGRES, REDIS = "postgresql://localhost/shop", "redis://localhost:6379/0"

RUN = """\
import ast, asyncio, inspect, sys
code = compile(open(sys.argv[1]).read(), sys.argv[1], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
module = type(sys)("example")
sys.modules["example"] = module
module.__file__ = sys.argv[1]
ran = eval(code, module.__dict__)
if inspect.iscoroutine(ran):
    asyncio.run(ran)
"""


def runnable(*languages: str) -> list[Any]:
    """Return the runnable blocks in these languages as parameters, marked if they need a server."""
    found = [block for block in BLOCKS if block.language in languages and not block.not_run and block.mark != "session"]
    return [
        pytest.param(block, id=str(block), marks=[pytest.mark.server] if uses_server(block) else []) for block in found
    ]


def uses_server(block: Block) -> bool:
    text = block.whole
    return block.language == "sql" or POSTGRES in text or REDIS in text or "PostgresServer" in text


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def replacements(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The replacements for addresses on pages."""
    block: Block = request.getfixturevalue("block")
    places: dict[str, str] = {}
    for name, script in ((API, []), (FLAKY, [answer(503), answer(503), performed()] * 2)):
        if name in block.whole:
            server = request.getfixturevalue("stack").enter_context(Server(*script))
            places |= {name: server.url, '"https://"': '"http://"'}
    if POSTGRES in block.whole:
        schema = request.getfixturevalue("postgres_schema")
        places[POSTGRES] = f"{request.getfixturevalue('postgres_url')}?schema={schema}"
        places[f"{POSTGRES}?"] = f"{places[POSTGRES]}&"
    if REDIS in block.whole:
        prefix = request.getfixturevalue("redis_prefix")
        places[REDIS] = f"{request.getfixturevalue('valkey_url')}?prefix={prefix}"
        places[f"{REDIS}?"] = f"{places[REDIS]}&"
    return places


def replace_addresses(text: str, places: dict[str, str]) -> str:
    for name in sorted(places, key=len, reverse=True):
        text = text.replace(name, places[name])
    return text


@pytest.mark.parametrize("block", runnable("python"))
def test_python_block_runs_twice(block: Block, replacements: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "example.py").write_text(replace_addresses(block.whole, replacements))
    command = [sys.executable, "run.py", "example.py"]
    printed = ""
    for _ in ("as pasted", "pasted again, in the same folder"):
        ran = run_to_end(command, cwd=tmp_path, env=without_coverage(), timeout=100)
        assert ran.returncode == 0, ran.stderr
        printed += ran.stdout
    if "sending invoice 42" in printed:  # called four times, it sends once
        assert printed.count("sending invoice 42") == 1


DJANGO = """\
import django
from django.conf import settings
from django.http import JsonResponse
from django.test import Client
from django.urls import path
settings.configure(ROOT_URLCONF=__name__, SECRET_KEY="x", ALLOWED_HOSTS=["*"], MIDDLEWARE=MIDDLEWARE, ONCEMORE=ONCEMORE,
    INSTALLED_APPS=INSTALLED_APPS,
    SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies", DATABASES={})
django.setup()
runs = []
def refund(request):
    runs.append(1)
    return JsonResponse({}, status=201)
urlpatterns = [path("refunds", refund)]
for status in ("stored", "replayed"):
    answer = Client().post("/refunds", headers={"Idempotency-Key": "k", "Authorization": "Bearer t"})
    assert answer.headers["Idempotency-Status"] == status
assert len(runs) == 1
"""


def test_django_settings_of_the_home_page_work(tmp_path: Path) -> None:
    [block] = [block for block in BLOCKS if block.page == ROOT / "docs" / "index.md" and "ONCEMORE = " in block.code]
    ran = subprocess.run([sys.executable, "-c", block.whole + DJANGO], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# The three lines for each framework: the code that they follow, and the code that follows them.
AROUND = {
    "FastAPI, Starlette": ("from fastapi import FastAPI; app = FastAPI()", ""),
    "Flask, WSGI": ("from flask import Flask; app = Flask('shop')", ""),
    "Django": ("INSTALLED_APPS, MIDDLEWARE = [], []", ""),
    "aiohttp": ("from aiohttp import web; app = web.Application()", ""),
    "Any function": ("", "def send_invoice(invoice_id: int) -> None: ..."),
    "A client that retries": ("", ""),
}


def test_three_lines_of_each_framework_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = (ROOT / "README.md").read_text().partition("## Your framework")[2].partition("Also:")[0]
    rows = dict(re.findall(r"^\| \[(.*?)\]\S+ \| (.*) \|$", table, re.MULTILINE))
    assert rows.keys() == AROUND.keys()
    for framework, (before, after) in AROUND.items():
        lines = re.findall(r"`(.*?)`", rows[framework])
        assert len(lines) == 3
        exec("\n".join(["from oncemore import Guard", before, *lines, after]), {})


# The conversations with a server


def sessions() -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.mark == "session"]


@pytest.mark.parametrize("block", sessions())
def test_server_answers_as_the_page_shows(block: Block, tmp_path: Path) -> None:
    """The page's files are written, its server is started, and each command prints the lines under it, in this order."""
    for file in BLOCKS:
        if file.page == block.page and (name := re.match(r"# (\S+\.(?:py|toml))\n", file.code)):
            (tmp_path / name[1]).write_text(file.code)
    server, *conversation = re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]
    assert server.startswith("uvicorn ")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", *shlex.split(server), "--port", port]
    with subprocess.Popen(command, cwd=tmp_path, env=without_coverage(), stderr=subprocess.DEVNULL) as started:
        try:
            wait_for_port(int(port))
            for line, *shown in map(str.splitlines, conversation):
                ran = subprocess.run(["bash", "-ec", line.replace("8000", port)], capture_output=True, text=True)
                printed = iter([line.strip() for line in ran.stdout.splitlines()])
                assert all(line in printed for line in shown), ran.stdout
        finally:
            started.terminate()


def wait_for_port(port: int) -> None:
    for _ in range(600):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise AssertionError(f"Nothing listens on port {port}")


@pytest.mark.parametrize("block", runnable("toml"))
def test_toml_block_is_a_valid_contract(block: Block) -> None:
    Contract.parse(block.whole).check()


@pytest.mark.parametrize("block", runnable("json"))
def test_json_block_is_valid(block: Block) -> None:
    assert json.loads(block.code)


@pytest.mark.parametrize("block", runnable("sql"))
def test_sql_block_runs_on_a_ledger(block: Block, postgres_url: str, postgres_schema: str) -> None:
    guard = Guard(f"{postgres_url}?schema={postgres_schema}")
    guard.stats()
    guard.close()
    with psycopg.connect(postgres_url, autocommit=True, options=f"-c search_path={postgres_schema}") as server:
        server.execute(block.code.encode())


@pytest.mark.parametrize("block", runnable("console", "bash"))
def test_command_line_works(block: Block, replacements: dict[str, str], tmp_path: Path) -> None:
    """`oncemore` runs in a folder with a contract and a ledger; extras of pip and targets of make must exist."""
    store = create_ledger(tmp_path)
    lines = commands(block)
    assert lines
    for line in lines:
        if extras := re.search(r"oncemore\[([\w,]+)\]", line):
            assert set(extras[1].split(",")) <= set(EXTRAS)
        if target := re.match(r"make (\w+)", line):
            assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        if re.search(r"(^|[|($ ])oncemore ", line):
            run_line(replace_addresses(line, replacements), tmp_path, store)


def create_ledger(folder: Path) -> str:
    """Write a contract and a ledger with a settled, a held and some expired operations, and return its URL."""
    (folder / "oncemore.toml").write_text(
        '[[rule]]\nmatch = "POST /refunds"\nname = "refunds.create"\nkey = "required"\n'
    )
    url = f"sqlite:///{folder}/once.db"
    guard = Guard(url)
    guard.run(
        Operation("refunds.create:principal:ann", "8e03978e", name="refunds.create"),
        lambda op: Outcome("response", 201),
    )
    for number in range(3):
        guard.run(Operation("old", f"expired-{number}"), lambda op: None, policy=Policy(ttl=0.001))
    lease = run(guard.store.claim(Operation("payments.create:principal:ann", "c0ffee17"), lease=30))
    run(guard.store.hold(lease))  # type: ignore[arg-type]
    guard.close()
    return url


def run_line(line: str, folder: Path, store: str) -> None:
    """Run the line in a shell, with the `oncemore` command of this source tree."""
    shim = folder / "bin" / "oncemore"
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m oncemore.tools.cli "$@"\n')
    shim.chmod(0o755)
    environment = without_coverage(PATH=f"{shim.parent}:{os.environ['PATH']}", ONCEMORE_STORE=store)
    ran = subprocess.run(
        ["bash", "-ec", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, f"{line}\n{ran.stderr}"


# A browser's code, in Node


BROWSER = """\
import assert from "node:assert";
import http from "node:http";
import { postOnce } from "./once.mjs";

const stored = new Map();
globalThis.sessionStorage = {
  getItem: (name) => stored.get(name) ?? null,
  setItem: (name, value) => stored.set(name, value),
  removeItem: (name) => stored.delete(name),
};
const problem = (status, error_code, retryable = false) =>
  [status, { "Content-Type": "application/problem+json" }, { error_code, retryable }];
const created = [201, { "Content-Type": "application/json" }, { id: "rf_1" }];
let keys = [];
let script = [];
const server = http.createServer((request, response) => {
  keys.push(request.headers["idempotency-key"]);
  request.resume().on("end", () => {
    const next = script.shift();
    if (next === "hang up") return request.socket.destroy();
    response.writeHead(next[0], next[1]).end(JSON.stringify(next[2]));
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const url = `http://127.0.0.1:${server.address().port}/refunds`;
const post = async (...acts) => {
  [keys, script] = [[], acts];
  return (await postOnce(url, { amount: 1000 }, { intention: "refund:1", attempts: 3, pause: 1 })).status;
};

// A lost connection, a conflict and an answer: one key, which is dropped with the answer.
assert.equal(await post("hang up", problem(409, "CONFLICT.idempotency.in_progress", true), created), 201);
assert.equal(keys.length, 3);
assert.equal(new Set(keys).size, 1);
assert.equal(stored.size, 0);
const first = keys[0];

// No answer at all: the key survives, and the next call sends it again.
await assert.rejects(post("hang up", "hang up", "hang up"));
const kept = keys[0];
assert.notEqual(kept, first);
assert.equal([...stored.values()][0], kept);
assert.equal(await post(created), 201);
assert.equal(keys[0], kept);

// A refusal that is final is not sent again, and its key is dropped.
assert.equal(await post(problem(422, "VALIDATION.payload")), 422);
assert.equal(keys.length, 1);
assert.equal(stored.size, 0);

// An unknown outcome is not sent again either, but its key is kept: a new one could do it twice.
assert.equal(await post(problem(409, "CONFLICT.idempotency.outcome_unknown")), 409);
assert.equal(keys.length, 1);
assert.equal([...stored.values()][0], keys[0]);
server.closeAllConnections();
server.close();
"""


def test_browser_client_keeps_its_key_until_the_answer(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node runs the JavaScript on the pages, and it is not installed")
    [block] = [block for block in BLOCKS if block.language == "javascript"]
    (tmp_path / "once.mjs").write_text(block.code)
    (tmp_path / "test.mjs").write_text(BROWSER)
    ran = subprocess.run([node, "test.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr


# Blocks that cannot run


def test_blocks_have_known_languages_and_commands() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    for block in BLOCKS:
        if block.language in ("console", "bash") and not block.not_run and block.mark != "session":
            assert all(re.search(r"(^|\()(oncemore|pip install|make|git clone) ", line) for line in commands(block)), (
                block
            )


def test_blocks_that_cannot_run_are_few_and_explained() -> None:
    excused = [block for block in BLOCKS if block.not_run]
    assert all(len(block.not_run) > 10 for block in excused)
    assert len(excused) == NOT_RUN, [str(block) for block in excused]
    marks = {block.mark.partition(":")[0] for block in BLOCKS}
    assert marks <= {"", "not run", "continues", "with", "session"}
