"""Tasks that run once, under existing job runners: one module for each runner, with a decorator `once_task`."""
