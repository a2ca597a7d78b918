"""Webhooks: signed messages over HTTP, delivered at least once."""
