"""Run all benchmarks (`python -m bench`), or some of them by name (`python -m bench web sqlite`)."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

ALL = (
    "fingerprint",
    "inside",
    "sqlite",
    "postgres",
    "redis",
    "tiered",
    "outbox",
    "transaction",
    "scale",
    "storage",
    "spread",
    "retry",
    "web",
    "webhooks",
    "memory",
)
ARGUMENTS = {"web": ["--plot", "docs/bench-web.svg"]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", nargs="*", help=", ".join(ALL))
    chosen = parser.parse_args().name or ALL
    if unknown := set(chosen) - set(ALL):
        parser.error(f"there is no {' and no '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    failed = []
    for name in chosen:
        print(f"\n── {name} " + "─" * (100 - len(name)), flush=True)
        began = time.monotonic()
        if subprocess.run([sys.executable, "-m", f"bench.{name}", *ARGUMENTS.get(name, [])]).returncode:
            failed.append(name)
        print(f"({time.monotonic() - began:.0f} s)", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
