"""`python -m mesh.front`: reads the command line, runs a front, says how it ended.

Exit codes: 0 stopped as asked, 1 failed, 2 usage. The log goes to stderr.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from mesh.controller.main import exit_code, parsed, served, settle
from mesh.domain.errors import InvalidInput
from mesh.domain.values import replace
from mesh.front.options import OPTIONS, read_cells
from mesh.front.server import FrontConfig, serve
from mesh.wire.credentials import client_tls, credentials, read_credentials, show


def main(arguments: Sequence[str] | None = None) -> int:
    def run() -> None:
        options = parsed(OPTIONS, arguments, "mesh.front", "Serve clients before several cells.")
        config = FrontConfig(**served(options), cells=read_cells(options.cells))
        shown = None if config.tls is None else client_tls(config.tls.folder)
        if options.key_file is None and credentials().key:
            show(replace(credentials(), tls=shown))  # the command line has read the key
        else:
            key_file = None if options.key_file is None else Path(options.key_file)
            show(read_credentials(os.environ, key_file, shown))
        if credentials().key and not config.keys and not options.open:
            raise InvalidInput(
                "whoever reaches this front would use its key, which is an operator's of the cells",
                hint="give --keys, so that each call needs one of its own, or --open if all may",
            )
        asyncio.run(serve(config, ready=lambda *_: settle()))

    return exit_code(run, "front")
