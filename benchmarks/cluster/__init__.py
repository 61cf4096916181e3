"""A Kubernetes of one node on this machine."""
