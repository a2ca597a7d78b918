"""`python -m oncemore`: the `oncemore` command."""

from .tools.cli import main

raise SystemExit(main())
