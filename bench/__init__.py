"""Benchmarks: oncemore compared with raw stores, unguarded apps and similar libraries, in the same run."""

import logging

# Warnings about servers that forget and callers without names are right, but say nothing new here.
logging.getLogger("oncemore").setLevel(logging.ERROR)
