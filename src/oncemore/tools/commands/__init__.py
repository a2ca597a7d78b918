"""The subcommands of `oncemore`: a file for each group of them."""
