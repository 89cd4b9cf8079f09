"""The node agent as it is, but that it makes blobs with its own priority. Below all others they
would be waited for until a busy machine leaves a core to them.
"""

import sys

from mesh_nodes.engines.openvino import blob_maker
from mesh_nodes.main import main

if __name__ == "__main__":
    blob_maker.NICE = blob_maker.WAITED_NICE = 0
    sys.exit(main())
