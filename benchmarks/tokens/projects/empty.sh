# An empty folder.
