"""oncemore: exactly-once effects in an at-least-once world.  The names below are the public interface."""

from importlib.metadata import version as _version

from ._contract.contract import Contract
from ._contract.policy import Policy
from ._contract.rule import Rule
from ._ledger.completer import Completer
from ._ledger.context import Op, current_operation
from ._ledger.decisions import Answer, Resolution
from ._ledger.guard import Guard
from ._ledger.model import Operation, Outcome, Record
from ._ledger.once import once
from .client.function import retry
from .client.retry import Retry
from .errors import OncemoreError
from .jobs.job import job
from .messages.inbox import Inbox
from .messages.outbox import Outbox
from .stores import connect
from .webhooks.webhooks import Webhooks

__version__ = _version("oncemore")

__all__ = [
    "Answer",
    "Completer",
    "Contract",
    "Guard",
    "Inbox",
    "OncemoreError",
    "Op",
    "Operation",
    "Outbox",
    "Outcome",
    "Policy",
    "Record",
    "Resolution",
    "Retry",
    "Rule",
    "Webhooks",
    "connect",
    "current_operation",
    "job",
    "once",
    "retry",
]
