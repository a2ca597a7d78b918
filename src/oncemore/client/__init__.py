"""The retry client: one key per intention, safe retries, hard deadlines.  The transports are modules of their own."""

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
from .interop import stamina_arguments, tenacity_arguments
from .keyring import MemoryKeyring, open_keyring
from .keyring.entry import Entry, Keyring, Resumed
from .keys import derived_key, new_key, random_key
from .pause import no_sleeping
from .retry import Retry
from .story import Attempt, RetryEvent, RetryObserver, Story

__all__ = [
    "Attempt",
    "AttemptTimeout",
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
