"""Which operations may be repeated, and how: rules, keys, templates, paths, profiles and policies."""
