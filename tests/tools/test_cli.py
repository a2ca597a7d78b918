"""The `oncemore` command: help, exit codes, completion, and the commands that need no server."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from oncemore import __version__ as version
from oncemore._contract.contract import Contract
from oncemore._contract.policy import Policy
from oncemore._contract.profiles import PROFILES
from oncemore._ledger.decisions import Resolution
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Lease, Operation, Outcome
from oncemore._runtime.plan import run
from oncemore.encryption import Seal
from oncemore.tools.cli import EXIT_CODES, main
from oncemore.tools.commands import COMMANDS, program
from oncemore.tools.commands.demo import PACKAGES
from oncemore.tools.commands.output import escape
from tests.tools.command import oncemore

CONTRACT = """
[[rule]]
match = "POST /refunds"
name = "refunds.create"
key = "required"
ttl = "30d"

[[rule]]
match = "POST /auth/refresh"
idempotent = false

[[rule]]
match = "POST /broadcast"
scope = "global"
"""


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_command(words: list[str]) -> None:
    ran = oncemore(*words)
    assert ran.code == 0
    assert all(name in ran.out for name in COMMANDS)


@pytest.mark.parametrize("group", ["contract", "keys", "inbox", "outbox", "schedule", "webhooks"])
def test_group_help_shows_each_command_in_one_line(group: str) -> None:
    commands = oncemore(group, "--help").out.partition("Commands:")[2]
    assert commands.strip()
    assert "..." not in commands


def every_command(group: click.Group, *before: str) -> list[tuple[str, ...]]:
    """Return the words of each command that is not a group."""
    found: list[tuple[str, ...]] = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += every_command(command, *before, name) if isinstance(command, click.Group) else [(*before, name)]
    return found


def test_every_command_has_help_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    commands = every_command(program)
    assert len(commands) > 10
    for words in commands:
        assert main([*words, "--help"]) == 0, words
        shown = capsys.readouterr().out
        assert "--json" in shown, words
        assert len(shown.split("\n\n")[1].strip()) > 20, words


def test_group_without_command_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for group in ("keys", "contract"):
        assert main([group]) == 0
        assert "Commands:" in capsys.readouterr().out, group


def test_unknown_command_suggests_the_nearest() -> None:
    ran = oncemore("capacit")
    assert ran.code == 2
    assert "did you mean 'capacity'" in ran.err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()


def test_help_imports_no_driver() -> None:
    check = (
        "import sys; before = set(sys.modules); from oncemore.tools.cli import main; main(['--help']);"
        "found = {'psycopg', 'redis', 'sqlite3', 'rich', 'httpx', 'requests'} & (set(sys.modules) - before);"
        "assert not found, found;"
        "assert not [name for name in sys.modules if name.startswith('oncemore.stores.')]"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_missing_click_names_the_install_command() -> None:
    check = "import sys; sys.modules['click'] = None; from oncemore.tools.cli import main; raise SystemExit(main([]))"
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "pip install 'oncemore[cli]'" in ran.stderr


@pytest.mark.parametrize(("shell", "word"), [("bash", "complete "), ("zsh", "compdef"), ("fish", "complete ")])
def test_completion_prints_a_script_for_each_shell(shell: str, word: str) -> None:
    ran = oncemore("--completion", shell)
    assert ran.code == 0
    assert word in ran.out
    assert "_ONCEMORE_COMPLETE" in ran.out


def test_shell_completion_completes_commands_and_choices() -> None:
    ran = oncemore(_ONCEMORE_COMPLETE="bash_complete", COMP_WORDS="oncemore keys re", COMP_CWORD="2")
    assert "resolve" in ran.out
    ran = oncemore(_ONCEMORE_COMPLETE="bash_complete", COMP_WORDS="oncemore keys list --state h", COMP_CWORD="4")
    assert ran.out == "plain,held\n"


# Exit codes


def test_missing_store_names_the_environment_variable() -> None:
    ran = oncemore("stats")
    assert ran.code == 2
    assert "ONCEMORE_STORE" in ran.err


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/0?timeout=1s", "postgresql://me:hidden@127.0.0.1:1/db?timeout=1s"]
)
def test_unreachable_store_exits_with_three_without_password(url: str) -> None:
    for words in (["stats"], ["keys", "list", "--json"], ["init", "--store", url, "/dev/null"]):
        ran = oncemore(*words, ONCEMORE_STORE=url)
        assert ran.code == 3 or words[0] == "init", ran.err
        assert "127.0.0.1:1" in ran.err
        assert "hidden" not in ran.err


def test_json_error_has_its_code() -> None:
    ran = oncemore("stats", "--json", "--store", "nosql://x")
    assert ran.code == 2
    assert '"error_code": "CONFIGURATION.invalid"' in ran.err


@pytest.mark.parametrize(
    "words",
    [
        ["keys", "list", "--state", "nope"],
        ["keys", "resolve", "k"],
        ["keys", "nope"],
        ["capacity", "--rate", "nan"],
        ["capacity", "--rate", "inf"],
        ["keys", "show", "\udcff"],
        ["keys", "show", "k", "--scope", "\udcff"],
        ["keys", "resolve", "k", "--released", "--note", "\udcff"],
        ["keys", "resolve", "k", "--value", "[" * 100_000],
        ["keys", "resolve", "k", "--status", "200", "--header", "a: b\r\nc: d"],
        ["keys", "resolve", "k", "--status", "200", "--header", "a b: c"],
        ["keys", "resolve", "k", "--status", "200", "--header", "a: \u20ac"],
    ],
    ids=lambda words: " ".join(words)[:60].encode("ascii", "replace").decode(),
)
def test_wrong_arguments_are_reported_as_text_and_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *named_store(words)]) == 2
    assert len(capsys.readouterr().err) > 20
    group = words[0] == "keys" and words[1] == "nope"  # a group has no --json
    assert main([*words, *named_store(words), "--json"]) == 2
    shown = capsys.readouterr()
    assert group or json.loads(shown.err.splitlines()[-1])["error_code"] == "CONFIGURATION.invalid"
    assert shown.out == ""


def named_store(words: list[str]) -> list[str]:
    return ["--store", "memory://"] if words[0] == "keys" and words[1] != "nope" else []


@pytest.mark.parametrize("words", [["--help"], ["capacity", "--json"], ["capacity"]])
def test_closed_pipe_exits_with_141_silently(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "oncemore.tools.cli", *words]
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.parametrize("words", [["--help"], ["capacity", "--json"], ["capacity"]])
def test_full_disk_exits_with_141(words: list[str]) -> None:
    command = [sys.executable, "-m", "oncemore.tools.cli", *words]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 141
    assert ran.stderr == "oncemore: the output could not be written: No space left on device\n"


@pytest.mark.parametrize(("closed", "code"), [("<&-", 1), (">&-", 1), ("2>&-", 1), ("<&- >&- 2>&-", 1), (">&- -y", 0)])
def test_closed_standard_streams_are_harmless(tmp_path: Path, closed: str, code: int) -> None:
    """Some schedulers close them.  SQLite's file must not get their descriptors, and no input means no."""
    url = f"sqlite:///{tmp_path / 'once.db'}"
    guard = Guard(url)
    guard.run(Operation("s", "k"), lambda op: 1)
    guard.close()
    command = f"{sys.executable} -m oncemore.tools.cli keys delete k --store {url} {closed}"
    ran = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert "Traceback" not in ran.stderr
    assert ran.returncode == code
    assert Guard(url).stats().settled == code, "deleted only if --yes was given"


def test_hanging_store_is_named_without_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        for url in (f"redis://{place}/0?timeout=0.5s", f"postgresql://me:hidden@{place}/db?timeout=0.5s"):
            ran = oncemore("stats", "--store", url)
            assert ran.code == 3
            assert place in ran.err
            assert "hidden" not in ran.err


def test_interrupt_at_a_prompt_changes_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/once.db"
    guard = Guard(url)
    guard.run(Operation("s", "k"), lambda op: None)
    command = [sys.executable, "-m", "oncemore.tools.cli", "keys", "delete", "k", "--store", url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    asked = process.stderr.read(len("Delete k of s (settled)?"))
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate()
    assert asked == b"Delete k of s (settled)?"
    assert process.returncode == 130
    assert b"Traceback" not in rest
    assert guard.find("s", "k") is not None
    guard.close()


def test_interrupt_while_the_prompt_is_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes between the question and the reading of the answer, and a "y" is in the input already."""

    class Interrupted(io.StringIO):
        def flush(self) -> None:
            if "?" in self.getvalue():
                signal.raise_signal(signal.SIGINT)

    url = f"sqlite:///{tmp_path}/once.db"
    guard = Guard(url)
    guard.run(Operation("s", "k"), lambda op: None)
    monkeypatch.setattr(sys, "stderr", Interrupted())
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["keys", "delete", "k", "--store", url]) == 130
    assert guard.find("s", "k") is not None
    guard.close()


def test_record_changed_during_the_prompt_is_not_touched(tmp_path: Path) -> None:
    """Meanwhile another operator resolved it, and the next attempt crashed: its outcome is unknown again."""
    url = f"sqlite:///{tmp_path}/once.db"
    guard = Guard(url)
    operation = Operation("s", "k")

    def crash() -> None:
        lease = run(guard.store.claim(operation, lease=30))
        assert isinstance(lease, Lease)
        run(guard.store.hold(lease))

    crash()
    for words in (["resolve", "k", "--released"], ["delete", "k"]):
        command = [sys.executable, "-m", "oncemore.tools.cli", "keys", *words, "--store", url]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stderr is not None
        process.stderr.read(len("Delete k of s"))
        guard.resolve("s", "k", Resolution.released(), retention=60)
        crash()
        _, shown = process.communicate(b"y\n")
        assert process.returncode == 1
        assert b"has changed since" in shown
        record = guard.find("s", "k")
        assert record is not None
        assert record.state == "held"
    guard.close()


def test_expiry_beyond_year_9999_is_shown_as_9999(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/once.db"
    guard = Guard(url)
    guard.run(Operation("s", "k"), lambda op: None, policy=Policy(ttl="99999999d"))
    guard.close()
    assert "9999-12-31" in oncemore("keys", "list", "--store", url).out
    assert oncemore("keys", "show", "k", "--json", "--store", url).json["expires_at"].startswith("9999-12-31")


def test_every_exit_code_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in page


# Untrusted text


def test_control_characters_in_keys_are_escaped(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/once.db"
    guard = Guard(url)
    guard.run(Operation("\x1b[31mred", "evil\x1b]0;title\x07[bold]key"), lambda op: None)
    guard.close()
    shown = oncemore("keys", "list", "--store", url).out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[bold]key" in shown
    assert escape("a\x1bb\nc\u202e") == "a\\x1bb\\nc\\u202e"


# Contracts


def test_contract_check_accepts_a_valid_contract(tmp_path: Path) -> None:
    (tmp_path / "oncemore.toml").write_text(CONTRACT)
    ran = oncemore("contract", "check", folder=tmp_path)
    assert (ran.code, ran.err) == (0, "")
    assert "3 rules, no faults" in ran.out
    assert "POST /broadcast: its scope is shared" in ran.out


def test_contract_check_names_every_fault_and_line(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('[[rule]]\nmatch = "POST /a"\ntll = "1d"\n\n[[rule]]\nmatch = "FETCH"\n')
    ran = oncemore("contract", "check", "bad.toml", folder=tmp_path)
    assert ran.code == 2
    assert "did you mean 'ttl'" in ran.err
    assert "(line 5)" in ran.err
    assert oncemore("contract", "check", "none.toml", folder=tmp_path).code == 2


def test_contract_check_json_lists_faults_with_lines(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('[[rule]]\nmatch = "POST /a"\ntll = "1d"\n\n[[rule]]\nmatch = "FETCH /x"\n')
    ran = oncemore("contract", "check", "bad.toml", "--json", folder=tmp_path)
    assert ran.code == 2
    assert [fault["line"] for fault in ran.json["faults"]] == [1, 5]
    assert "did you mean 'ttl'" in ran.json["faults"][0]["fault"]


@pytest.mark.parametrize("framework", ["starlette", "flask", "django"])
def test_contract_check_app_finds_rules_without_route(tmp_path: Path, framework: str) -> None:
    (tmp_path / "oncemore.toml").write_text(
        '[[rule]]\nmatch = "POST /refund"\n\n[[rule]]\nmatch = "POST /refunds/{id}"\n'
    )
    (tmp_path / "shop.py").write_text(APPS[framework])
    ran = oncemore("contract", "check", "--app", "shop:app", folder=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "No route of the app serves the rule 'POST /refund', so it guards nothing" in ran.err
    assert "POST /refunds/{id}" not in ran.err
    assert ("did you mean 'POST /refunds'" in ran.err) == (framework != "django")  # its views do not tell their methods


APPS = {
    "starlette": """
from starlette.applications import Starlette
from starlette.routing import Mount, Route
def refund(request): ...
one = Mount("/refunds", routes=[Route("/{id:int}", refund, methods=["POST"])])
app = Starlette(routes=[Route("/refunds", refund, methods=["POST"]), one])
""",
    "flask": """
from flask import Flask
app = Flask(__name__)
@app.post("/refunds")
def refund(): ...
@app.post("/refunds/<int:id>")
def other(id): ...
""",
    "django": """
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.urls import path
settings.configure(ROOT_URLCONF=__name__, SECRET_KEY="x")
urlpatterns = [path("refunds", print), path("refunds/<int:id>", print)]
app = get_wsgi_application()
""",
}


def test_contract_may_name_functions_of_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("def did_it_happen(op): ...\n")
    rule = '[[rule]]\nmatch = "POST /a"\non_unknown = "resolve"\nresolver = "shop:did_it_happen"\n'
    (tmp_path / "oncemore.toml").write_text(rule)
    assert oncemore("contract", "show", "--json", folder=tmp_path).json["rules"][0]["resolver"] == "shop:did_it_happen"


def test_contract_show_applies_defaults(tmp_path: Path) -> None:
    (tmp_path / "oncemore.toml").write_text(CONTRACT)
    shown = oncemore("contract", "show", folder=tmp_path).out
    assert "30d" in shown
    assert "not guarded" in shown
    assert "(defaults)" in shown.splitlines()[-1]
    assert oncemore("contract", "show", "--json", folder=tmp_path).json["defaults"]["ttl"] == 86400.0
    one = oncemore("contract", "show", "--rule", "refunds.create", folder=tmp_path).out
    assert "header Idempotency-Key" in one
    assert oncemore("contract", "show", "--rule", "refund.create", folder=tmp_path).code == 2


def test_init_writes_a_valid_contract_for_every_profile(tmp_path: Path) -> None:
    for profile in PROFILES:
        path = tmp_path / f"{profile}.toml"
        assert main(["init", str(path), "--profile", profile]) == 0, profile
        contract = Contract.load(path)
        contract.check()
        assert contract.profile == profile


def test_init_into_missing_folder_exits_with_two(tmp_path: Path) -> None:
    ran = oncemore("init", tmp_path / "no" / "such" / "folder.toml")
    assert ran.code == 2
    assert "cannot be written" in ran.err


# Encryption


def test_seal_keys_decrypt_outcomes_and_encrypt_decisions(tmp_path: Path) -> None:
    keys = [secrets.token_bytes(32) for _ in range(2)]
    variable = " ".join(base64.b64encode(key).decode() for key in keys)
    url = f"sqlite:///{tmp_path}/once.db"
    guard = Guard(url, seal=Seal(keys), cache=0)
    guard.run(Operation("s", "done"), lambda op: Outcome("response", 201, (), b"confidential"))
    lease = run(guard.store.claim(Operation("s", "crashed"), lease=30))
    assert isinstance(lease, Lease)
    run(guard.store.hold(lease))
    show = ["keys", "show", "done", "--outcome", "--json", "--store", url]
    assert oncemore(*show, ONCEMORE_SEAL_KEYS=variable).json["outcome"]["body"] == "confidential"
    assert "confidential" not in oncemore(*show).out
    ran = oncemore(
        "keys", "resolve", "crashed", "--value", '"paid"', "--yes", "--store", url, ONCEMORE_SEAL_KEYS=variable
    )
    assert ran.code == 0, ran.err
    assert guard.run(Operation("s", "crashed"), lambda op: pytest.fail("performed")).how == "replayed"
    guard.close()


def test_malformed_seal_keys_are_refused_and_not_shown() -> None:
    for words in ("not-base64!", base64.b64encode(b"short").decode()):
        ran = oncemore("stats", "--store", "memory://", ONCEMORE_SEAL_KEYS=words)
        assert ran.code == 2
        assert words not in ran.err


# Decisions


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ([], "--released"),
        (["--released", "--status", "200"], "one of"),
        (["--value", "text"], "needs its quotes"),
        (["--value", "1", "--header", "a: b"], "--status"),
        (["--status", "200", "--header", "nonsense"], "Content-Type"),
        (["--released", "--ttl", "soon"], "not a duration"),
    ],
)
def test_resolve_needs_exactly_one_decision(words: list[str], fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "resolve", "k", *words, "--store", "memory://"]) == 2
    assert fix in capsys.readouterr().err


def test_demo_looks_for_every_package_of_its_extra() -> None:
    """Otherwise a package that is missing ends in a traceback instead of the command that installs it."""
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    named = re.search(r"oncemore\[(.*)\]", extras["demo"][0])
    assert named is not None
    requirements = [*extras["demo"][1:], *(each for extra in named[1].split(",") for each in extras[extra])]
    packages = {re.split(r"[\[<>=]", each)[0].replace("-", "_") for each in requirements}
    assert packages - {"click", "rich", "psycopg_pool"} == set(PACKAGES)  # the command itself needs the first two


@pytest.mark.chaos
def test_demo_exits_with_zero() -> None:
    ran = oncemore("demo", "--json")
    assert ran.code == 0
    assert ran.json["holds"] is True


@pytest.mark.chaos
def test_demo_runs_from_an_installed_wheel(tmp_path: Path) -> None:
    """The wheel contains the demo, so no checkout is needed."""
    root = Path(__file__).parents[2]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(root)], check=True)
    [wheel] = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True)
    command = [sys.executable, "-m", "oncemore.tools.cli", "demo", "1", "--json"]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["holds"] is True


def test_python_m_oncemore_is_the_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "oncemore", "--version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip().endswith(version)) == (0, True)
