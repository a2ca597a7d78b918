"""Writes the table of docs/howto/workers.md from what the stories of tests/workers have left behind: `workers.py FOLDER`.

FULL=1 ONCEMORE_WORKERS=.workers pytest tests/workers && python docs/_generate/workers.py .workers
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "howto" / "workers.md"
STORIES = {
    "duplicate": "sent twice",
    "long": "longer than the visibility timeout",
    "killed": "worker killed",
    "frozen": "worker frozen",
    "limit": "time limit",
    "retry": "failed, retried",
}
BEGIN, END = "<!-- made by docs/_generate/workers.py -->\n", "<!-- end -->"


def table(rows: list[dict[str, dict[str, list[int]]]]) -> str:
    """The table, one row for each runner: effects without and with `once_task`."""
    lines = [f"| | {' | '.join(STORIES.values())} |", f"|---|{'---|' * len(STORIES)}"]
    for row in rows:
        for title, figures in row.items():
            cells = [f"{figures[story][0]} → **{figures[story][1]}**" if story in figures else "–" for story in STORIES]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(folder: str) -> None:
    rows = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    text = PAGE.read_text()
    PAGE.write_text(
        re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + table(rows) + END, text, flags=re.DOTALL)
    )


if __name__ == "__main__":
    main(sys.argv[1])
