"""The kubernetes backend: boxes that are Pods of a cluster.

The cluster makes and places them, and keeps what there is to know about a box with its Pod. Our
guest ends its box when it has had no host for too long, so no box outlives us forever.
"""
