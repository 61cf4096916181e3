"""Attacks, each harmless if it succeeds; see __main__.py."""

from . import files, kernel, processes, sockets
from .base import PROBES

__all__ = ["PROBES", "files", "kernel", "processes", "sockets"]
