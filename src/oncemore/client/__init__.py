"""The retry client: one key per operation, safe retries, hard deadlines.

The transports are modules of their own: `oncemore.client.httpx`, `requests`, `aiohttp` and `urllib3`.
"""

from .._runtime.backoff import Backoff
from .deadlines import no_sleeping
from .errors import (
    AttemptTimeout,
    CircuitOpen,
    CredentialsMissing,
    KeyReused,
    KeyringError,
    OutcomeUnknown,
    RetriesExhausted,
    RetryError,
)
from .function import retrying
from .hosts import Breaker, Budget
from .keyring import MemoryKeyring, open_keyring
from .keyring.entry import Entry, Keyring, Resumed
from .keys import derived_key, new_key, random_key
from .retry import Retry, stamina_arguments, tenacity_arguments
from .story import Attempt, RetryEvent, RetryObserver, Story

__all__ = [
    "Attempt",
    "AttemptTimeout",
    "Backoff",
    "Breaker",
    "Budget",
    "CircuitOpen",
    "CredentialsMissing",
    "Entry",
    "KeyReused",
    "Keyring",
    "KeyringError",
    "MemoryKeyring",
    "OutcomeUnknown",
    "Resumed",
    "RetriesExhausted",
    "Retry",
    "RetryError",
    "RetryEvent",
    "RetryObserver",
    "Story",
    "derived_key",
    "new_key",
    "no_sleeping",
    "open_keyring",
    "random_key",
    "retrying",
    "stamina_arguments",
    "tenacity_arguments",
]
