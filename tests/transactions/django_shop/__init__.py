"""A Django project whose refunds are a model, with its ledger in the same database."""
