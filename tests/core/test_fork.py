"""After a fork the child starts afresh, and does not end what its parent is doing."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest

from oncemore._runtime import forks as fork

FORK = """
import gc, os, sys
from oncemore._runtime.forks import reset_in_child

class Work:
    def __del__(self):
        if os.getpid() != parent:
            os.write(1, b"the parent's work was ended")

class Thing:
    def __init__(self):
        self._reset()
        reset_in_child(self)

    def _reset(self):
        self.born, self.work = os.getpid(), Work()

parent = os.getpid()
thing, gone = Thing(), Thing()
del gone
child = os.fork()
if child == 0:
    gc.collect()
    fresh = thing.born == os.getpid()
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(0 if thing.born == os.getpid() else 1)
    os._exit(0 if fresh and os.waitpid(grandchild, 0)[1] == 0 else 1)
assert os.waitpid(child, 0)[1] == 0
assert thing.born == parent
"""


def test_a_child_and_its_children_start_afresh_and_leave_their_parents_work_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], check=True, timeout=20, capture_output=True)
    assert done.stdout == b""


class Thing:
    def _reset(self) -> None: ...


def test_nothing_is_kept_alive_only_to_be_reset() -> None:
    thing = Thing()
    fork.reset_in_child(thing)
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None


class Still:
    def __init__(self, ready: bool = True, ends: Callable[[], object] = list) -> None:
        self.ready = ready
        self.ends = ends
        self.told: list[str] = []

    def _rest(self) -> bool:
        self.told.append("rest")
        return self.ready

    def _put_away(self) -> None:
        self.ends()

    def _go_on(self) -> None:
        self.told.append("go on")


def test_what_has_come_to_rest_before_a_fork_goes_on_after_it_and_in_the_child_the_next_fork_is_free() -> None:
    rest, still, busy = fork.Rest(), Still(), Still(ready=False)
    rest.things.update({still, busy})
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        os._exit(0 if grandchild == 0 else os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    assert os.waitpid(child, 0)[1] == 0
    assert still.told == ["rest", "go on"]
    assert busy.told == ["rest"]


def test_what_is_interrupted_while_it_comes_to_rest_goes_on_after_the_fork() -> None:
    """os.fork swallows the interrupt, and everyone who needs the file would wait for ever."""
    still = Still(ends=lambda: signal.raise_signal(signal.SIGINT))
    rest = fork.Rest()
    rest.things.add(still)
    try:
        with pytest.raises(KeyboardInterrupt):
            rest._begin()
    finally:
        rest._end()  # which os.fork calls all the same
    assert still.told == ["rest", "go on"]


def test_a_child_keeps_nothing_at_rest_that_was_its_parents() -> None:
    """Step by step, as os.fork has them called."""
    rest, still = fork.Rest(), Still()
    rest.things.add(still)
    rest._begin()
    rest._forget()
    rest._begin()  # of the child's own fork
    rest._end()
    assert still.told == ["rest", "rest", "go on"]
