"""Every code block in README and documentation runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncemore._contract.contract import Contract
from oncemore._contract.policy import Policy
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation, Outcome
from oncemore._runtime.plan import run
from tests.client.server import Server, answer
from tests.pages import BLOCKS, ROOT, Block, commands
from tests.support.processes import without_coverage

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
LANGUAGES = {"python", "toml", "console", "bash", "json", "sql", "http", "text", "mermaid"}
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
    found = [block for block in BLOCKS if block.language in languages and not block.not_run]
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
    for name, script in ((API, []), (FLAKY, [answer(503), answer(503)])):
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
def test_python_block_runs(block: Block, replacements: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "example.py").write_text(replace_addresses(block.whole, replacements))
    command = [sys.executable, "run.py", "example.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=without_coverage(), capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    if "sending invoice 42" in ran.stdout:  # the first example: called twice, it sends once
        assert ran.stdout.count("sending invoice 42") == 1


DJANGO = """\
import django
from django.conf import settings
from django.http import JsonResponse
from django.test import Client
from django.urls import path
settings.configure(ROOT_URLCONF=__name__, SECRET_KEY="x", ALLOWED_HOSTS=["*"], MIDDLEWARE=MIDDLEWARE, ONCEMORE=ONCEMORE,
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.sessions"],
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


def test_django_settings_of_the_readme_work(tmp_path: Path) -> None:
    [block] = [block for block in BLOCKS if block.page.name == "README.md" and "ONCEMORE = " in block.code]
    ran = subprocess.run([sys.executable, "-c", block.code + DJANGO], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


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


# Blocks that cannot run


def test_blocks_have_known_languages_and_commands() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    for block in BLOCKS:
        if block.language in ("console", "bash") and not block.not_run:
            assert all(re.search(r"(^|\()(oncemore|pip install|make|git clone) ", line) for line in commands(block)), (
                block
            )


def test_blocks_that_cannot_run_are_few_and_explained() -> None:
    excused = [block for block in BLOCKS if block.not_run]
    assert all(len(block.not_run) > 10 for block in excused)
    assert len(excused) == NOT_RUN, [str(block) for block in excused]
    marks = {block.mark.partition(":")[0] for block in BLOCKS}
    assert marks <= {"", "not run", "continues", "with"}
