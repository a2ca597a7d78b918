"""An example service: payments, captures, refunds, voids, a double-entry ledger, and a provider's webhooks."""
