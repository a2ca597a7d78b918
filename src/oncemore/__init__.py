"""Ask once more; it happens once.  Exactly-once effects in an at-least-once world."""

from .core.guard import Guard
from .core.judge import Answer
from .core.model import Operation, Outcome, Record
from .core.once import once
from .core.op import Op
from .core.policy import Policy
from .core.resolution import Resolution
from .errors import OncemoreError
from .stores import connect

__all__ = [
    "Answer",
    "Guard",
    "OncemoreError",
    "Op",
    "Operation",
    "Outcome",
    "Policy",
    "Record",
    "Resolution",
    "connect",
    "once",
]
