"""Which processes are alive: each holds a lock that the system lets go of when the process dies, however it dies."""

from __future__ import annotations

import os
import secrets
import threading

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, every other process counts as gone
    fcntl = None  # type: ignore[assignment]

# One descriptor per file and process, never closed: closing any descriptor of a file lets go of all locks in it.
_held: dict[str, tuple[int, int]] = {}
_lock = threading.Lock()


def this_process(path: str) -> int:
    """The number of this process: the position of a byte that it keeps locked in the file *path* while it lives."""
    return _hold(path)[1]


def is_alive(path: str, owner: int) -> bool:
    """Whether the process with the number *owner* still holds its lock."""
    descriptor, own = _hold(path)
    if owner == own or fcntl is None:
        return owner == own
    try:
        # Shared, so that two processes that ask at once do not take each other for the owner.
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, owner)
    except OSError:
        return True
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, owner)
    return False


def _hold(path: str) -> tuple[int, int]:
    with _lock:
        if path not in _held:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            number = 1 + secrets.randbits(62)
            if fcntl is not None:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            _held[path] = (descriptor, number)
        return _held[path]


def _forget_parent() -> None:
    """A forked child has its parent's memory but none of its locks."""
    global _lock
    _held.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
