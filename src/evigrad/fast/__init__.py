"""The same results in less time or memory: rows as products, or in another type or place."""
