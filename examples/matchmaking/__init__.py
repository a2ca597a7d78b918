"""A matchmaking service: sign-in, offers and matches, chat and safety reports, each of which may be asked for again."""
