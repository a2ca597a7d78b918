"""The seeds' refund API as a service: payments, captures, refunds, voids, a double-entry ledger, a provider's webhooks."""
