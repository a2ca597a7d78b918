"""Canonical forms of what was asked, and their digests: equal requests have equal fingerprints."""
