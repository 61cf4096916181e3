"""Owns boxes and all that is done in them. The one door; knows no HTTP."""
