"""The brokers, one file each: `connect(address, settings)` makes one, `OPTIONS` are those of its URL."""
