"""The demo: its stories, and how they are shown."""
