"""Runs a folder of code in a box: its dependencies, its way into the box, its results."""
