"""The brokers.  Each file has a subclass of `UrlBroker`, and the OPTIONS of its URL."""
