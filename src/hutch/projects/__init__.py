"""A folder of somebody's code, run in a box: what it needs, how it gets there, what comes back."""
