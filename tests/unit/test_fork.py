"""Forks: the child resets inherited objects, and refuses files that were in use."""

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
from oncemore.errors import ConfigurationError

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


def test_child_and_grandchild_are_reset_without_ending_parents_work() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], check=True, timeout=20, capture_output=True)
    assert done.stdout == b""


class Thing:
    def _reset(self) -> None: ...


def test_reset_in_child_keeps_nothing_alive() -> None:
    thing = Thing()
    fork.reset_in_child(thing)
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None


class File:
    """A thing whose file must not be open during a fork."""

    def __init__(self, path: str, *, idle: bool = True, closes: Callable[[], object] = list) -> None:
        self.path = path
        self.idle = idle
        self.closes = closes
        self.calls: list[str] = []
        fork.close_before_fork(self)

    def _close_for_fork(self) -> bool:
        self.calls.append("close")
        self.closes()
        return self.idle

    def _end_fork(self) -> None:
        self.calls.append("end")


def in_child(check: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_idle_file_is_closed_before_fork_and_usable_after() -> None:
    idle = File("idle")
    assert in_child(lambda: (fork.check_usable("idle"), in_child(lambda: fork.check_usable("idle")))) == 0
    assert idle.calls == ["close", "end"]
    fork.check_usable("idle")


def test_file_in_use_is_refused_in_the_child_by_name() -> None:
    busy, idle = File("busy", idle=False), File("idle")

    def check() -> None:
        fork.check_usable("idle")
        assert in_child(refused) == 0  # also in the child's own children

    def refused() -> None:
        with pytest.raises(
            ConfigurationError, match=r"busy: it was in use when this process was forked, .* Fork before serving"
        ):
            fork.check_usable("busy")

    assert in_child(check) == 0
    assert busy.calls == ["close"]
    assert idle.calls == ["close", "end"]
    fork.check_usable("busy")


def test_file_with_one_of_two_connections_in_use_is_refused() -> None:
    files = File("shared", idle=False), File("shared")

    def check() -> None:
        with pytest.raises(ConfigurationError):
            fork.check_usable("shared")

    assert in_child(check) == 0
    assert [file.calls[0] for file in files] == ["close", "close"]


def test_interrupt_before_a_fork_refuses_all_files_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """os.fork swallows the interrupt, and goes on."""
    monkeypatch.setattr(sys, "unraisablehook", lambda told: ignored.append(told.exc_type))
    ignored: list[object] = []
    struck = File("struck", closes=lambda: signal.raise_signal(signal.SIGINT))

    def check() -> None:
        with pytest.raises(ConfigurationError):
            fork.check_usable("struck")

    assert in_child(check) == 0
    assert ignored == [KeyboardInterrupt]
    assert struck.calls == ["close"]
    struck.closes = list
    assert in_child(lambda: fork.check_usable("struck")) == 0


def test_fork_steps_in_one_process() -> None:
    """Step by step, as os.fork has them called: the coverage of a child is not measured."""
    idle, busy = File("idle"), File("busy", idle=False)
    fork._before()
    fork._after_in_parent()
    fork._before()
    forking = fork._forking
    fork._after_in_child()
    try:
        fork.check_usable("idle")
        with pytest.raises(ConfigurationError):
            fork.check_usable("busy")
        fork._before()  # of the child's own fork
    finally:
        fork._after_in_parent()
        fork._refused.clear()
        forking.release()
    # In the child they are the parent's, and are left alone.
    assert idle.calls == ["close", "end", "close"]
    assert busy.calls == ["close", "close"]


def test_file_reset_in_child_is_closed_before_its_forks() -> None:
    class ResetFile(File):
        def _reset(self) -> None: ...

    file = ResetFile("reset")
    fork.reset_in_child(file)
    fork._before()
    forking = fork._forking
    fork._after_in_child()
    fork._before()
    fork._after_in_parent()
    forking.release()
    assert file.calls == ["close", "close", "end"]
