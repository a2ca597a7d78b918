"""The code blocks of README and documentation, with the setup that each needs.

A comment on the line before a block says how to run it:

    <!-- continues -->         it continues the page's previous Python block
    <!-- with: django -->      code that runs before it: see PRELUDES
    <!-- session -->           a server is started, and each command prints what is shown: see test_pages.py
    <!-- not run: ... -->      the reason why it cannot run; the tests count these
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<mark>[^\n]*?) -->\n)?^(?P<indent>[ ]*)```(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)

CLIENT = """\
import httpx
from oncemore.client import Retry
from oncemore.client.httpx import RetryTransport
transport = RetryTransport(retry=Retry.user_facing(), keyring="sqlite:///keys.db")
client = httpx.Client(base_url="https://api.example.com", transport=transport)
"""

PRELUDES = {
    "client": CLIENT,
    "client of a flaky server": CLIENT.replace("api.", "flaky."),  # it fails twice, then it answers
    "django": """\
import django
from django.conf import settings
settings.configure(SECRET_KEY="x", INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth",
    "rest_framework", "rest_framework.authtoken"], DATABASES={})
django.setup()
""",
    "settings of startproject": """\
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.sessions"]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]
""",
    "contract": """\
from pathlib import Path
Path("oncemore.toml").write_text('[[rule]]\\nmatch = "POST /refunds"\\nkey = "required"\\n')
""",
}


@dataclass(frozen=True, slots=True)
class Block:
    """A code block: its place, its text, and the code that must run before it."""

    page: Path
    number: int
    language: str
    mark: str
    code: str
    before: str = ""

    @property
    def not_run(self) -> str:
        """The reason why the block cannot run; empty if it can."""
        kind, _, reason = self.mark.partition(": ")
        return reason if kind == "not run" else ""

    @property
    def whole(self) -> str:
        """The block with all code that must run before it."""
        kind, _, name = self.mark.partition(": ")
        return (PRELUDES[name] if kind == "with" else "") + self.before + self.code

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}-{self.number}-{self.language}"


def blocks_of(page: Path) -> Iterator[Block]:
    last = ""
    for number, found in enumerate(BLOCK.finditer(page.read_text())):
        indent, mark = found["indent"], found["mark"] or ""
        code = "".join(line.removeprefix(indent) for line in found["code"].splitlines(keepends=True))
        block = Block(page, number, found["language"], mark, code, last if mark == "continues" else "")
        if block.language == "python":
            last = block.whole
        yield block


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands(block: Block) -> list[str]:
    """Return the command lines of a block without comments: those after a `$`, or all lines in bash."""
    joined = block.code.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.startswith("$ ") or block.language == "bash"]
    stripped = (re.sub(r"(^|\s)#( .*)?$", "", line.removeprefix("$ ")).strip() for line in lines)
    return [line for line in stripped if line]
