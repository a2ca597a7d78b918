"""Jobs that run once per slot, and the schedule that runs them."""

from .job import job
from .marks import Missed
from .schedule import Schedule, Slot
from .scheduler import SlotCounts

__all__ = ["Missed", "Schedule", "Slot", "SlotCounts", "job"]
