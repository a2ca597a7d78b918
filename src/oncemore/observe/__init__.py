"""Observers: events of guards and retry clients as log records, metrics and traces.

An observer is a function of one `Event`: `Guard(url, observers=[function])`.
"""

from .._ledger.events import Event

__all__ = ["Event"]
