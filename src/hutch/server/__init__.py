"""A server: an engine with a memory. Owners, rules, a store; HTTP is in `http/`."""
