"""Images from elsewhere, pulled or imported to this machine, and unpacked once."""
