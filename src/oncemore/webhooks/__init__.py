"""Webhooks: messages from service to service over HTTP, which come at least once, and from whoever knows the address."""
