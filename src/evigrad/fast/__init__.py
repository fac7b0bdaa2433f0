"""The same numbers in less time or memory: rows as products, rows in another type or place."""
