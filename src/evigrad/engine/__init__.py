"""Private: one pass after another over a block, to the log evidence and its gradient."""
