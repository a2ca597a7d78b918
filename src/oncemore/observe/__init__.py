"""Observers: events of guards and retry clients as log records, metrics and traces."""
