"""Generated reference pages are up to date, and the other pages name everything that is public."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import click
import httpx
import pytest

import oncemore
from oncemore._contract.settings import SETTINGS
from oncemore._ledger.states import TRANSITIONS
from oncemore.tools.commands import COMMANDS, program
from oncemore.web.asgi import IdempotencyMiddleware

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "oncemore"
ARCHITECTURE = (DOCS / "explain" / "architecture.md").read_text()


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"generate_{name}", DOCS / "_generate" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli", "contract", "events"])
def test_generated_page_is_up_to_date(name: str) -> None:
    """If this fails, run: python docs/_generate/<name>.py"""
    assert (DOCS / "reference" / f"{name}.md").read_text() == generator(name).page()


def test_every_setting_is_documented() -> None:
    assert [name for name, setting in SETTINGS.items() if not setting.doc] == []


def test_api_page_has_every_public_name() -> None:
    shown = re.findall(r"^::: (\S+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    missing = {f"oncemore.{name}" for name in oncemore.__all__} - set(shown)
    assert missing == {"oncemore.OncemoreError"}  # it is on the page with all other errors


def test_awaited_methods_have_docstrings() -> None:
    shown = [getattr(oncemore, name) for name in oncemore.__all__]
    methods = [(owner, name, value) for owner in shown if inspect.isclass(owner) for name, value in vars(owner).items()]
    assert [f"{owner.__name__}.{name}" for owner, name, value in methods if is_undocumented(name, value)] == []


def is_undocumented(name: str, value: object) -> bool:
    return inspect.iscoroutinefunction(value) and not name.startswith("_") and not value.__doc__


def test_cli_page_has_every_command() -> None:
    page = (DOCS / "reference" / "cli.md").read_text()
    context = click.Context(program)
    for name in COMMANDS:
        command = program.get_command(context, name)
        inner = list(command.commands) if isinstance(command, click.Group) else [""]
        assert all(f"## oncemore {name} {word}".rstrip() in page for word in inner)


def test_every_howto_and_explanation_is_linked() -> None:
    """A page that only the navigation links to is hard to find."""
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name in ("howto", "explain")]
    texts = {page: page.read_text() for page in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]}
    alone = [
        page.name
        for page in pages
        if not any(f"{page.name})" in text or f"{page.name}#" in text for other, text in texts.items() if other != page)
    ]
    assert alone == []


# The tests that prove each behaviour


@cache
def functions(path: Path) -> frozenset[str]:
    """The names of all functions in a file, those of its classes too."""
    if not path.exists():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_behaviours_page_names_existing_tests() -> None:
    """Tests may be renamed and moved; then this page follows."""
    named = re.findall(r"`(\S+\.py)::(\w+)`", (DOCS / "reference" / "behaviours.md").read_text())
    assert len(named) > 90
    assert [f"{path}::{name}" for path, name in named if name not in functions(ROOT / path)] == []


def test_behaviours_page_numbers_each_behaviour_once_and_names_its_tests() -> None:
    parts = re.split(r"^- (?=<a id)", (DOCS / "reference" / "behaviours.md").read_text(), flags=re.MULTILINE)[1:]
    heads = [re.match(r'<a id="(\w+-\d+)"></a>\*\*(\w+-\d+)\.\*\* ', part) for part in parts]
    anchors = [head[1] for head in heads if head is not None and head[1] == head[2]]
    assert len(set(anchors)) == len(parts)
    assert [part for part in parts if "::test_" not in part] == []


# The page on the architecture


@pytest.mark.parametrize("page", ["docs/explain/architecture.md", "CONTRIBUTING.md"])
def test_page_names_existing_files(page: str) -> None:
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / page).read_text()))
    assert len(named) > 10
    assert [path for path in named if not any((base / path).exists() for base in (ROOT, SOURCE))] == []


def test_state_diagram_has_each_transition_of_the_table() -> None:
    """Edges in parentheses are those of the clock.  Verbs that leave the state as it is may be missing."""
    drawn: dict[tuple[str, str], str] = {}
    for before, after, verbs in re.findall(r"^    (\S+) --> (\S+): (.+)$", ARCHITECTURE, re.MULTILINE):
        names = [verb for verb in verbs.split(", ") if not verb.startswith("(")]
        drawn |= {(before.replace("[*]", "absent"), verb): after.replace("[*]", "absent") for verb in names}
    changes = {edge: after for edge, after in TRANSITIONS.items() if edge[0] != after}
    assert {edge: after for edge, after in drawn.items() if edge[0] != after} == changes
    assert drawn.items() <= TRANSITIONS.items()


def test_glossary_has_each_state_and_verb_once() -> None:
    page = (DOCS / "explain" / "words.md").read_text()
    words = [word for word in re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE) if word != "word"]
    assert len(set(words)) == len(words)
    verbs = {verb.removesuffix("_as") for _, verb in TRANSITIONS}
    assert verbs - set(words) == set()
    assert [state for state, _ in TRANSITIONS if state not in words and f"(`{state}`)" not in page] == []


async def test_architecture_page_names_each_file_that_a_post_goes_through(tmp_path: Path) -> None:
    """The second POST is traced: the first one opens the file, and finds the rules."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    seen: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            seen.add(str(path.relative_to(SOURCE)))

    guard = oncemore.Guard(f"sqlite:///{tmp_path}/once.db")
    transport = httpx.ASGITransport(app=IdempotencyMiddleware(app, guard=guard))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for key in ("first", "second"):
            sys.setprofile(note if key == "second" else None)
            try:
                answer = await client.post("/refunds", headers={"Idempotency-Key": key, "Authorization": "Bearer t"})
            finally:
                sys.setprofile(None)
            assert (answer.status_code, answer.headers["idempotency-status"]) == (201, "stored")
    await guard.aclose()
    walk = ARCHITECTURE[ARCHITECTURE.index("## The walk of a POST") : ARCHITECTURE.index("## Packages")]
    assert "_ledger/attempt.py" in seen
    assert sorted(path for path in seen if f"`{path}`" not in walk) == []
