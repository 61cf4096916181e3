"""The kernel: a process that runs cells of Python and keeps their variables.

It lives inside a box and answers the guest over one socket. The same files are imported under two
names, `hutch.kernel` here and `hutch_kernel` in a box, so everything in this package is imported
relatively, and from the standard library otherwise. Python 3.9 is enough.
"""
