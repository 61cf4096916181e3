"""Many paths in few words: the folder once, its names behind it. Nothing is lost by it."""

from __future__ import annotations

FEW = 4  # paths in one folder that are not worth it


def grouped(paths: list[str]) -> list[str]:
    """`src/a/: x.py y.py`, folders in the order in which they came; or the paths as they are.

    A path with a space in it would be misread, and stays as it is.
    """
    folders: dict[str, list[str]] = {}
    lines: list[str] = []
    for path in paths:
        folder, _, name = path.rstrip("/").rpartition("/")
        if " " in path or path.endswith(":"):
            lines.append(path)
        else:
            folders.setdefault(folder, []).append(name + "/" * path.endswith("/"))
    for folder, names in folders.items():
        # Without a folder `/x` and `x` would look alike.
        if len(names) < FEW or not folder:
            lines += [f"{folder}/{name}" if folder else name for name in names]
        else:
            lines.append(f"{folder}/: {' '.join(names)}")
    return lines if sum(map(len, lines)) < sum(map(len, paths)) else paths
