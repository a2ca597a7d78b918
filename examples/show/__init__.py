"""The stories of the demo, and their display."""
