"""Lets `python -m precisionlint` be the command."""

import sys

from precisionlint.cli import main

if __name__ == "__main__":
    sys.exit(main())
