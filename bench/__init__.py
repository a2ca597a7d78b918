"""Benchmarks: oncemore compared with raw stores, unguarded apps and similar libraries, in the same run."""
