"""Runs the controller as a process."""

import sys

from mesh.controller.main import main

if __name__ == "__main__":
    sys.exit(main())
