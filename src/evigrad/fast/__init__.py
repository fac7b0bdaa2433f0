"""The same results in less time or memory: rows as products, or stored in another type or place."""
