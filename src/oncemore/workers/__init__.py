"""Tasks that run once, for the job runners that people already have: one module for each, and in each the word `once_task`."""
