"""A program that runs in a box: asks the build backend of a package for a wheel (PEP 517).

    python3 backend.py requires|wheel BACKEND OUT PATH...

It is started in the folder of the package. OUT is the JSON file for the list of further build
requirements, or the folder for the wheel. PATH are the folders of a backend that is in the package
itself. It has to run on any Python that a box may have.
"""

import importlib
import json
import os
import site
import sys


def main(what: str, backend: str, out: str, *paths: str) -> None:
    packages = os.environ["PYTHONPATH"]
    site.addsitedir(packages)  # PYTHONPATH alone is not searched for .pth files
    sys.path[:0] = [os.path.abspath(path) for path in paths]
    module, _, attributes = backend.partition(":")
    hooks = importlib.import_module(module)
    for name in filter(None, attributes.split(".")):
        hooks = getattr(hooks, name)
    if what == "wheel":
        hooks.build_wheel(out)
        return
    requires = getattr(hooks, "get_requires_for_build_wheel", None)
    with open(out, "w") as file:
        json.dump(list(requires()) if requires else [], file)


if __name__ == "__main__":
    # The folder of this file is not the package's; the package's own is first for setup.py only.
    sys.path.pop(0)
    main(*sys.argv[1:])
