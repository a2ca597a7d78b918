"""Generated reference pages are up to date, and the other pages name everything that is public."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import click
import pytest

import oncemore
from oncemore._contract.settings import SETTINGS
from oncemore.tools.commands import COMMANDS, program

DOCS = Path(__file__).parents[1] / "docs"


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
