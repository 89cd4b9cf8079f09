"""The tokenizer.json of a folder that is imported: that it is there and that it can be read."""

from pathlib import Path

from tokenizers import Tokenizer

from mesh.domain.errors import MeshError, TornModel, UnsupportedModel
from mesh_loader.model_info import TOKENIZER_BYTES_MAX, read_bounded


def require_tokenizer(folder: Path) -> None:
    """Raises UnsupportedModel where there is none, TornModel where it cannot be loaded."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(
            f"{folder.name} has no tokenizer.json",
            hint="write one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    try:
        Tokenizer.from_buffer(read_bounded(path, TOKENIZER_BYTES_MAX))
    except MeshError:
        raise
    except BaseException as error:  # the library raises bare Exception, and panics with even less
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise TornModel(
            f"{folder.name}/tokenizer.json is corrupt: {error}", hint="fetch the folder again"
        ) from error
