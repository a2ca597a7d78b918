"""The output of the demo: colours and a spinner on a terminal, plain lines elsewhere or with NO_COLOR."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .stories import Ending, Played, Story

WIDTH = 100  # columns, if the output is not a terminal


class Display:
    """Prints the demo."""

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else WIDTH
        self.out = Console(width=width, highlight=False, emoji=False, markup=False)

    def say(self, text: str = "", style: str = "") -> None:
        self.out.print(text, style=style, soft_wrap=True)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show a spinner on a terminal while the block runs."""
        if not self.out.is_terminal:
            yield
            return
        with self.out.status(Text(what, style="dim")):
            yield

    def story(self, number: int, story: Story) -> None:
        self.out.print()
        self.out.print(Text(f"{number}. {story.title}", style="bold"))

    def ending(self, label: str, story: Story, ending: Ending, *, judged: bool) -> None:
        """Print one line; if *judged*, it says whether the ending is right."""
        many = f"{ending.effects} {story.effect}{'' if ending.effects == 1 else 's'}"
        style = ("green" if ending.holds else "bold red") if judged else ("red" if ending.effects != 1 else "")
        mark = ("✓" if ending.holds else "✗") if judged else " "
        line = Text.assemble(f"   {label:17}", (f"{mark} {many:12}", style), (f" {ending.how}", "dim"))
        self.out.print(line)

    def table(self, played: Sequence[Played]) -> None:
        """Print all endings as a table."""
        rows = [
            (f"{number}. {story.title}", ended.requests, without.effects, ended.effects, ended.holds)
            for number, story, without, ended in played
        ]
        self.verdicts(("story", "requests", "effects without", "effects with"), rows)

    def verdicts(self, heads: Sequence[str], rows: Sequence[tuple[str, int, int, int, bool]]) -> None:
        """Print a table: a story, three numbers, and whether its end is right."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column(heads[0])
        for head in heads[1:]:
            table.add_column(head, justify="right")
        table.add_column("verdict")
        for title, *numbers, holds in rows:
            verdict = Text("✓ once" if holds else "✗ broken", style="green" if holds else "bold red")
            table.add_row(title, *map(str, numbers), verdict)
        self.out.print()
        self._print(table)

    def ledger(self, ledger: dict[str, Any], stories: dict[str, int]) -> None:
        """Print the entries of the stories' refunds: the amounts that are owed, and those that the provider confirmed."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for head in ("entry", "kind", "refund", "debit", "credit"):
            table.add_column(head)
        table.add_column("amount", justify="right")
        table.add_column("story", justify="right")
        for entry in ledger["entries"]:
            if entry["reference"] in stories:
                amount = f"{entry['amount'] / 100:.2f} {entry['currency']}"
                cells = [entry["kind"], entry["reference"], entry["debit"], entry["credit"], amount]
                table.add_row(str(entry["number"]), *cells, f"{stories[entry['reference']]}.")
        self.out.print()
        self.out.print(Text("The ledger of the service with oncemore (GET /ledger)", style="bold"))
        self._print(table)
        balances = ", ".join(f"{account} {amount / 100:+.2f}" for account, amount in ledger["balances"].items())
        self.say(f"Balances: {balances}; together {sum(ledger['balances'].values()) / 100:.2f}")

    def _print(self, table: Table) -> None:
        """Print the table without the spaces with which rich fills its last column."""
        with self.out.capture() as printed:
            self.out.print(table)
        for line in printed.get().splitlines():
            self.out.file.write(f"{line.rstrip()}\n")

    def curls(self, url: str, charge: str) -> None:
        """Print commands to try, ready to be pasted."""
        body = json.dumps({"charge_id": charge, "amount": 500})
        ask = f"curl -i {url}/refunds -H 'Authorization: Bearer demo' -H 'Idempotency-Key: try-1'"
        self.out.print()
        self.say(f"The service is up at {url}.  Try:", style="bold")
        self.say(f"  {ask} --json '{body}'")
        self.say(f"  curl -s {url}/ledger")
        self.say(f"  curl -s {url}/metrics")
        self.say(f"  curl -s {url}/openapi.json")
        self.say("Run the first line twice: the second answer says `idempotency-status: replayed`.")
        self.say("Ctrl-C ends the demo and removes its files.", style="dim")
