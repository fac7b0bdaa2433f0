"""``python -m evigrad``: the command line."""

from evigrad.cli import main

raise SystemExit(main())
