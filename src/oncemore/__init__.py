"""Ask once more; it happens once.  Exactly-once effects in an at-least-once world."""

from .client.function import retry
from .client.retry import Retry
from .core.completer import Completer
from .core.contract import Contract
from .core.guard import Guard
from .core.judge import Answer
from .core.model import Operation, Outcome, Record
from .core.once import once
from .core.op import Op
from .core.policy import Policy
from .core.resolution import Resolution
from .core.rule import Rule
from .errors import OncemoreError
from .messages.inbox import Inbox
from .stores import connect

__all__ = [
    "Answer",
    "Completer",
    "Contract",
    "Guard",
    "Inbox",
    "OncemoreError",
    "Op",
    "Operation",
    "Outcome",
    "Policy",
    "Record",
    "Resolution",
    "Retry",
    "Rule",
    "connect",
    "once",
    "retry",
]
