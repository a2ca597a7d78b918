"""A caller that a test kills: `python -m tests.examples.killed_caller <library> <url> <keyring> <charge>`."""

from __future__ import annotations

import sys

from .callers import Caller


def main(library: str, url: str, keyring: str, charge: str) -> None:
    Caller(library, url, keyring=keyring).refund(charge)


if __name__ == "__main__":
    main(*sys.argv[1:])
