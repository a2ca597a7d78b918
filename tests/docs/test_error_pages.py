"""Every error that a caller can get has a page that says what happened and what to do."""

from __future__ import annotations

import inspect
from pathlib import Path

from oncemore import errors

FOLDER = Path(__file__).parents[2] / "docs" / "errors"
# The root and the branch are never raised as themselves.
ERRORS = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, errors.OncemoreError) and "code" in vars(found) and found is not errors.OncemoreError
]


def test_each_code_has_its_page() -> None:
    for error in ERRORS:
        page = (FOLDER / f"{error.code}.md").read_text()
        retryable = "yes" if error.retryable else "no"
        assert page.startswith(f"# {error.title}\n")
        assert f"| `{error.code}` | {error.status} | {retryable} |" in page
        headings = [line for line in page.splitlines() if line.startswith("## ")]
        assert headings == ["## What happened", "## What the caller should do", "## What the operator should do"]


def test_no_page_is_left_over() -> None:
    assert {page.stem for page in FOLDER.glob("*.md")} == {error.code for error in ERRORS} | {"index"}


def test_list_of_errors_has_every_code() -> None:
    rows = (FOLDER / "index.md").read_text().splitlines()
    for error in ERRORS:
        retryable = "yes" if error.retryable else "no"
        assert f"| [`{error.code}`]({error.code}.md) | {error.status} | {retryable} | {error.title} |" in rows
