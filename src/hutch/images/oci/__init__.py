"""OCI images: pulled or imported to this machine, and unpacked once."""
