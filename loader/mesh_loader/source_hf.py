"""`hf://org/name@revision`: what the text means; hub_download fetches it.

huggingface_hub takes longer to import than all the rest of the loader, so only a source that needs
it brings it in.
"""

import re
from dataclasses import dataclass

from mesh.domain.errors import InvalidInput

DEFAULT_REVISION = "main"

_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_REVISION = re.compile(r"[\w./-]{1,200}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A parsed hf:// source. `revision` is a branch, a tag or a commit."""

    name: str
    revision: str


def parse_hf(source: str) -> Repository:
    """The parts of an hf:// source. Raises InvalidInput for anything but org/name[@revision]."""
    name, separator, revision = source.removeprefix("hf://").partition("@")
    revision = revision if separator else DEFAULT_REVISION
    if not _REPOSITORY.fullmatch(name) or not _REVISION.fullmatch(revision) or ".." in source:
        raise InvalidInput(
            f"{source!r} names no repository of the Hugging Face hub",
            hint="write hf://org/name or hf://org/name@revision",
        )
    return Repository(name=name, revision=revision)
