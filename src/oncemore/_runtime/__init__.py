"""How plans run: drivers, batches of store calls, wake-ups, forks and clocks.  Knows nothing of ledgers."""
