"""Run the command line with ``python -m evigrad``."""

from evigrad.cli import main

raise SystemExit(main())
