"""The names of what engines derive from a model, below `prepared/` in its folder.

The engine writes and reads the folder of its key; the store's upkeep has to know which key engines
of this release read, for what an older one derived stands for no original.
"""

OPENVINO_VERSION = 2
"""Raised when the engine of CPU nodes comes to derive, or to lay out, other weights."""


def openvino_key(precision: str) -> str:
    """Of the weights that CPU nodes map, in `precision`."""
    return f"openvino-{precision}-v{OPENVINO_VERSION}"


def is_current(key: str) -> bool:
    """Whether an engine of this release reads what lies under the key."""
    return key.startswith("openvino-") and key.endswith(f"-v{OPENVINO_VERSION}")
