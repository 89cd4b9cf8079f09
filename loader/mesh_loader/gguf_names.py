"""What is known of GGUF without a look into a file: how one begins, and what an import makes of it.

Apart from the modules that read one, whose package takes a quarter of a node's start: most nodes
never import a GGUF file.
"""

from pathlib import Path

from mesh_loader.model_files import opened

MAGIC = b"GGUF"
BLOCKS_FILE = "model.ggml"
"""In a model's folder: its matrices of 4 bits, as they were in the file; see `gguf_import`."""


def begins_with_magic(path: Path) -> bool:
    """Whether a file begins as a GGUF file does."""
    with opened(path) as file:
        return file.read(len(MAGIC)) == MAGIC
