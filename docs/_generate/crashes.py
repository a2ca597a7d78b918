"""Makes docs/explain/crashes.md of what the crash tests have left behind: `crashes.py FOLDER`, or `--check FOLDER`.

ONCEMORE_MATRIX=.matrix pytest tests/chaos && python docs/_generate/crashes.py .matrix
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

PAGE = Path(__file__).parents[1] / "explain" / "crashes.md"
LEVELS = ("transaction", "lease, resolve", "lease, hold", "steps")
POINTS = (
    "before claim",
    "after claim",
    "after effect",
    "before commit",
    "commit sent, answer lost",
    "after commit",
    "during response",
)
FEW = 4  # drivers that are named in each row
HEAD = """\
# Crash tests

Each row below is a test.
The test kills a real process with SIGKILL at that point (or cuts the connection before the server's answer), lets another process take over, and sends the request again.
`make test` runs them all, and fails if their results differ from this page.
"Effects in the end" is the number of rows that the effect has left in the database.

"""
MEANING = {
    "transaction": '`effect = "transaction"`: the claim, the effect and the outcome are one transaction.',
    "lease, resolve": '`effect = "lease"`, `on_unknown = "resolve"`: a function finds out whether the effect happened.',
    "lease, hold": '`effect = "lease"`, `on_unknown = "hold"`: an unknown outcome waits for a person.',
    "steps": '`effect = "steps"`: the result of each step is stored; the retry continues after the last finished step.',
}


def page(rows: list[dict[str, object]]) -> str:
    """The page, from the tests' rows."""
    found: dict[tuple[str, str, str, int], set[str]] = defaultdict(set)
    for row in rows:
        found[str(row["level"]), str(row["point"]), str(row["retry"]), int(str(row["effects"]))].add(str(row["driver"]))
    parts = [HEAD]
    for level in LEVELS:
        cells = sorted((POINTS.index(key[1]), key, drivers) for key, drivers in found.items() if key[0] == level)
        if not cells:
            continue
        parts.append(f"## {level}\n\n{MEANING[level]}\n\n")
        parts.append("| killed | the retry | effects in the end | proven on |\n|---|---|---|---|\n")
        most = max((drivers for *_, drivers in cells), key=len)
        everywhere = most if len(most) > FEW else None  # named once, below the table
        for _, (_, point, retry, effects), drivers in cells:
            shown = f"all {len(most)} drivers" if drivers == everywhere else ", ".join(sorted(drivers))
            parts.append(f"| {point} | {retry} | {effects} | {shown} |\n")
        if everywhere:
            parts.append(f"\nThe {len(most)} drivers are {', '.join(sorted(most))}; *alchemy* is SQLAlchemy.\n")
        parts.append("\n")
    return "".join(parts).rstrip() + "\n"


def main(arguments: list[str]) -> int:
    *options, folder = arguments
    rows = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    text = page(rows)
    if "--check" not in options:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE} does not say what the crash tests have found; make it with: python {sys.argv[0]} {folder}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
