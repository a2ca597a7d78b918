"""What can be set, by environment variables; every one has a value that works on a desk."""

from __future__ import annotations

import os
from dataclasses import dataclass

# For desks and tests: whoever knows it can forge webhooks, so a real service has its own, from where its secrets are kept.
DESK_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass(frozen=True, slots=True)
class Settings:
    """*database* holds the payments and the ledger of operations together: sqlite:/// or postgresql://."""

    database: str = "sqlite:///payments.db"
    provider: str = "http://127.0.0.1:8010"
    provider_timeout: float = 2.0  # seconds for one call, with all its attempts
    webhook_secret: str = DESK_SECRET
    guarded: bool = True
    completes: bool = True  # what is left in the middle is finished without its caller

    @classmethod
    def read(cls) -> Settings:
        """The settings of this process."""
        found, usual = os.environ.get, cls()
        return cls(
            database=found("PAYMENTS_DATABASE", usual.database),
            provider=found("PAYMENTS_PROVIDER", usual.provider),
            provider_timeout=float(found("PAYMENTS_PROVIDER_TIMEOUT", usual.provider_timeout)),
            webhook_secret=found("PAYMENTS_WEBHOOK_SECRET", usual.webhook_secret),
            guarded=found("PAYMENTS_GUARD", "on") != "off",
            completes=found("PAYMENTS_COMPLETER", "on") != "off",
        )
