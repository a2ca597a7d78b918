"""The brokers, one file each: a subclass of `UrlBroker`, and the OPTIONS of its URL."""
