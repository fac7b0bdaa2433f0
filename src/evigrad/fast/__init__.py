"""Save time or memory: keep rows as products, or store rows in another type or place."""
