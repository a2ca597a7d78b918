"""The settings of the service, from environment variables; the defaults work on a developer's machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

# For development and tests only: anyone who knows a service's secret can forge webhooks.
DEVELOPMENT_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass(frozen=True, slots=True)
class Settings:
    """*database* holds both the payments and the idempotency ledger: sqlite:///... or postgresql://..."""

    database: str = "sqlite:///payments.db"
    provider: str = "http://127.0.0.1:8010"
    provider_timeout: float = 2.0  # seconds for one call including its retries
    webhook_secret: str = DEVELOPMENT_SECRET
    guarded: bool = True
    completes: bool = True  # finish interrupted operations even if their callers do not retry

    @classmethod
    def read(cls) -> Settings:
        """Return the settings of this process."""
        get, default = os.environ.get, cls()
        return cls(
            database=get("PAYMENTS_DATABASE", default.database),
            provider=get("PAYMENTS_PROVIDER", default.provider),
            provider_timeout=float(get("PAYMENTS_PROVIDER_TIMEOUT", default.provider_timeout)),
            webhook_secret=get("PAYMENTS_WEBHOOK_SECRET", default.webhook_secret),
            guarded=get("PAYMENTS_GUARD", "on") != "off",
            completes=get("PAYMENTS_COMPLETER", "on") != "off",
        )
