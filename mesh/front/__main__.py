"""Runs a front as a process."""

import sys

from mesh.front.main import main

if __name__ == "__main__":
    sys.exit(main())
