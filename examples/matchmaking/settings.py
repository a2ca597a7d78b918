"""The settings of the service, from environment variables; the defaults work on a developer's machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

# For development and tests only: anyone who knows a service's secret can forge webhooks.
DEVELOPMENT_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass(frozen=True, slots=True)
class Settings:
    """*database* holds the rows and the webhooks, and unless *ledger* names a Redis, the idempotency records as well."""

    database: str = "sqlite:///matchmaking.db"
    ledger: str = ""
    webhook_url: str = ""
    webhook_secret: str = DEVELOPMENT_SECRET
    schedules: bool = True
    test_hooks: bool = False

    @classmethod
    def read(cls) -> Settings:
        """Return the settings of this process."""
        get, default = os.environ.get, cls()
        return cls(
            database=get("MATCHMAKING_DATABASE") or default.database,
            ledger=get("MATCHMAKING_LEDGER") or default.ledger,
            webhook_url=get("MATCHMAKING_WEBHOOK_URL") or default.webhook_url,
            webhook_secret=get("MATCHMAKING_WEBHOOK_SECRET") or default.webhook_secret,
            schedules=get("MATCHMAKING_SCHEDULER", "on") != "off",
            test_hooks=get("MATCHMAKING_TEST_HOOKS", "off") == "on",
        )
