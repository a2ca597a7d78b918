"""Canonical forms of requests and values, and their digests: equal requests have equal fingerprints."""
