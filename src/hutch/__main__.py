"""`python -m hutch` is `hutch`."""

from .cli import main

if __name__ == "__main__":
    main()
