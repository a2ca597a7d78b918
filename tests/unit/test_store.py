"""Parts that all stores share: the names of claims, and filters, which match all records by default."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from oncemore._ledger.model import Holder
from oncemore._ledger.store import Filter, Page, Stats


def test_claim_names_are_unique_across_threads() -> None:
    holder = Holder()
    with ThreadPoolExecutor(8) as pool:
        names = [name for batch in pool.map(lambda _: [holder.next() for _ in range(200)], range(16)) for name in batch]
    assert len(set(names)) == len(names) == 3200


def test_two_holders_of_one_process_do_not_share_names() -> None:
    assert Holder().next() != Holder().next()


def test_a_name_fits_into_a_column() -> None:
    assert len(Holder().next()) < 100


FORK = """
import os, sys
from oncemore._ledger.model import Holder

holder = Holder()
first = holder.next()
child = os.fork()
if child == 0:
    mine = [holder.next() for _ in range(3)]
    assert len(set(mine)) == 3 and first not in mine
    assert all(f":{os.getpid()}:" in name for name in mine)
    sys.exit(0)
mine = [holder.next() for _ in range(3)]
assert all(f":{os.getpid()}:" in name for name in mine)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_child_does_not_repeat_its_parents_names() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=20)


def test_filter_and_stats_have_empty_defaults() -> None:
    assert (Filter().state, Filter().scope, Filter().key, Filter().name, Filter().lapsed) == (None,) * 5
    assert Stats() == Stats(running=0, settled=0, released=0, held=0, lapsed=0, expired=0, archived=0)
    assert Page((), None).cursor is None
