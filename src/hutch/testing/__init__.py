"""For those who write backends, and for those who test what they build on Hutch."""
