"""Processes of multiprocessing's for tests: strangers to the test's own process, forked where their imports are done.

The nursery (nursery.py) is for programs; this is for functions, in pools and with barriers.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from .nurse import MEASURED

# What their functions are in.
MODULES = ["tests.client.test_ledger_keyring", "tests.stores.redis.children"]


def strangers() -> ForkServerContext:
    """A context whose processes inherit nothing from this one, as between unrelated services."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    kept = {name: os.environ.pop(name) for name in MEASURED if name in os.environ}
    try:
        forkserver.ensure_running()  # now, so that it is not measured; it ends with this process
    finally:
        os.environ.update(kept)
    return context
