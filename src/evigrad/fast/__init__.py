"""Save time or memory: keep rows as products, or change their data type or device."""
