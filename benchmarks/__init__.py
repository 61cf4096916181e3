"""Every number in SPECIFICATION.md, measured beside its peers in the same run."""
