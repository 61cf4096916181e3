"""Runs inside the box. Imports `hutch.wire` and the standard library only."""
