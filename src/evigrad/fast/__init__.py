"""Save time or memory: store rows as products, or change their data type or device."""
