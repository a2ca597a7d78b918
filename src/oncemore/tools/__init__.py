"""The command line, for operators and scripts."""
