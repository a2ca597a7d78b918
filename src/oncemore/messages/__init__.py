"""Messages between services: each is received once, however often it is delivered."""
