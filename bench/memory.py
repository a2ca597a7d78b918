"""Memory of a guarded server over 200 000 new operations through the ASGI middleware: `python -m bench.memory`.

The cache of outcomes is bounded by bytes, so memory grows until the cache is full, and then stays.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
from pathlib import Path

from .load import fresh, load
from .web import Contender, server

REQUESTS, STEP_SECONDS = 200_000, 5.0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        contender = Contender("oncemore, SQLite", "oncemore", f"sqlite:///{Path(folder) / 'once.db'}")
        with server(contender, sys.executable) as (port, pid):
            done = 0
            while done < REQUESTS:
                done += load(port, fresh(secrets.token_hex(4)), STEP_SECONDS).requests
                print(f"{done:8} requests  {resident(pid):7.1f} MiB resident", flush=True)


def resident(pid: int) -> float:
    """Return the resident memory of the process in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


if __name__ == "__main__":
    main()
