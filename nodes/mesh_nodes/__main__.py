"""`python -m mesh_nodes`: a node agent."""

import sys

from mesh_nodes.main import main

if __name__ == "__main__":
    sys.exit(main())
