"""House rules: layers of imports, documentation, packaging, and names."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import oncemore

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "oncemore"
MODULES = sorted(SOURCE.rglob("*.py"))
PURE = [
    SOURCE / "errors.py",
    *sorted(
        path for pure in ("_runtime", "_ledger", "_contract", "_fingerprint") for path in (SOURCE / pure).rglob("*.py")
    ),
]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

VAGUE = re.compile(r"(Manager|Handler|Helper|Service|Layer)$|^_?Base")
SITE = "https://oncemore.example/"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

# Modules of the standard library that do I/O.  The pure packages may not import them.
IO_MODULES = {
    "socket",
    "ssl",
    "http",
    "select",
    "selectors",
    "sqlite3",
    "subprocess",
    "ftplib",
    "smtplib",
    "multiprocessing",
}
WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(module: ast.Module) -> Iterator[str]:
    """Yield the top-level names of all absolute imports."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


# Layers


def offenders(paths: list[Path], offends: Callable[[Path], object]) -> list[str]:
    """Return the files that break a rule."""
    return [relative(path) for path in paths if offends(path)]


def test_pure_packages_import_the_standard_library_and_msgspec_only() -> None:
    allowed = {*sys.stdlib_module_names, "msgspec"} - IO_MODULES

    def foreign(path: Path) -> set[str]:
        module = ast.parse(path.read_text())
        blocks = [node for node in ast.walk(module) if isinstance(node, ast.If)]
        for_checkers = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
        found = {name for block in for_checkers for name in imported(ast.Module(block.body, []))}
        return (
            set(imported(module)) - allowed - (found & {"typing_extensions"})
        )  # which every type checker brings along

    assert offenders(PURE, foreign) == []


def test_pure_packages_read_the_wall_clock_in_one_file() -> None:
    def reads_the_clock(path: Path) -> bool:
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        read = {(ast.unparse(call.value), call.attr) for call in calls if isinstance(call, ast.Attribute)}
        return bool(read & WALL_CLOCKS)

    assert offenders([path for path in PURE if path.name != "clock.py"], reads_the_clock) == []


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("errors.py", "_ledger"),
        ("_runtime/plan.py", "stores"),
        ("stores/__init__.py", "web"),
        ("web/__init__.py", "testing"),
        ("_runtime/plan.py", "_runtime.batching"),
    ],
)
def test_import_against_the_layers_fails(module: str, forbidden: str, tmp_path: Path) -> None:
    assert lint_imports(tmp_path, module, f"import oncemore.{forbidden}\n") == 1


def test_imports_follow_the_layers(tmp_path: Path) -> None:
    assert lint_imports(tmp_path) == 0


def lint_imports(folder: Path, module: str = "errors.py", extra: str = "") -> int:
    """Return the exit code of import-linter on a copy of the package with *extra* at the end of *module*."""
    shutil.copytree(SOURCE, folder / "oncemore", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    with (folder / "oncemore" / module).open("a") as file:
        file.write(extra)
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {"PYTHONPATH": str(folder), "PATH": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode


# Documentation


def test_navigation_lists_every_page() -> None:
    def leaves(node: Any) -> Iterator[str]:
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from leaves(child)
        if isinstance(node, str):
            yield node

    listed = list(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_links_to_files_are_valid() -> None:
    def broken(page: Path) -> list[str]:
        targets = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
        return [target for target in targets if target and not (page.parent / target).exists()]

    assert {relative(page): broken(page) for page in PAGES if broken(page)} == {}


def test_links_of_the_readme_lead_to_pages() -> None:
    """They are absolute, because the README is also shown where the repository is not."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    links = [link for link in LINK.findall(readme) if not link.endswith(".svg")]  # pictures are files of the repository
    assert [link for link in links if "://" not in link] == []
    pages = [link.removeprefix(SITE).strip("/") for link in links if link.startswith(SITE)]
    known = {
        str(page.relative_to(ROOT / "docs").with_suffix("")).removesuffix("/index")
        for page in (ROOT / "docs").rglob("*.md")
    }
    assert set(pages) - known == set()


RUNNERS = {"celery", "dramatiq", "rq", "arq", "taskiq", "huey", "procrastinate"}


def test_every_extra_is_documented_and_in_all() -> None:
    extras: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(extras)
    everything = {name for part in extras["all"] for name in re.findall(r"\w+", part.removeprefix("oncemore"))}
    # A user brings the runner of its tasks; and arq needs another redis-py than Celery.
    assert {*everything, *RUNNERS, "all"} == set(extras)


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  make ([\w-]+)", shown, re.MULTILINE) == [
        "help",
        "demo",
        "demo-matchmaking",
        "check",
        "test",
        "bench",
        "docs",
        "clean",
    ]


# Names


def test_every_module_has_a_docstring() -> None:
    filled = [path for path in MODULES if path.read_text()]
    assert offenders(filled, lambda path: not ast.get_docstring(ast.parse(path.read_text()))) == []


def test_no_class_has_a_vague_name() -> None:
    def vague(path: Path) -> list[str]:
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        return [node.name for node in classes if VAGUE.search(node.name) and not inherits_its_name(node)]

    assert offenders(MODULES, vague) == []


def inherits_its_name(node: ast.ClassDef) -> bool:
    """Return whether the vague word comes from a base class, as in a subclass of urllib3's PoolManager."""
    return any(VAGUE.search(ast.unparse(parent)) for parent in node.bases)


def test_no_file_has_todo_marks() -> None:
    marks = re.compile(rf"\b({'|'.join(('TO' + 'DO', 'FIX' + 'ME', 'XX' + 'X'))})\b")
    everywhere = [*MODULES, *PAGES, *sorted((ROOT / "tests").rglob("*.py"))]
    assert offenders(everywhere, lambda path: marks.search(path.read_text())) == []


def test_package_exports_few_names() -> None:
    assert 0 < len(oncemore.__all__) <= 21
    assert all(hasattr(oncemore, name) for name in oncemore.__all__)


def test_package_has_type_marker_and_licence() -> None:
    assert (SOURCE / "py.typed").exists()
    assert (ROOT / PROJECT["project"]["license-files"][0]).read_text().startswith("MIT License")


# Tests


def test_at_most_ten_tests_depend_on_timing() -> None:
    marked = [path.read_text().count("@pytest.mark." + "timing") for path in (ROOT / "tests").rglob("test_*.py")]
    assert sum(marked) <= 10


def test_names_of_tests_have_at_most_ten_words() -> None:
    def long_names(path: Path) -> list[str]:
        names = re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
        return [name for name in names if name.count("_") > 10]

    files = [*(ROOT / "tests").rglob("*.py"), *(SOURCE / "testing").rglob("*.py")]
    assert {relative(path): long_names(path) for path in files if long_names(path)} == {}
