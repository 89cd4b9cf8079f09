"""gRPC: domain values to protobuf and back, errors, the link of a node, the client of a cell.

Importing it quietens gRPC's own log, which would otherwise write a line of internals to the
terminal when a server goes away; that is possible only before gRPC itself is imported.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
