"""The names of what engines derive from a model, below `prepared/` in its folder.

The engine writes and reads the folder of its key; the store's upkeep has to know which key engines
of this release read, for what an older one derived stands for no original.
"""

OPENVINO_VERSION = 2
"""The version rises when the engine of CPU nodes derives other weights or lays them out in another
way.
"""
_VERSIONS = {"i4": 3}
"""The same of a precision that has changed alone: others' weights may have no originals any more.
"""


def openvino_key(precision: str) -> str:
    """The key of the weights that CPU nodes map, in `precision`."""
    return f"openvino-{precision}-v{_VERSIONS.get(precision, OPENVINO_VERSION)}"


def is_current(key: str) -> bool:
    """Whether an engine of this release reads what lies under the key."""
    precision, _, _ = key.removeprefix("openvino-").rpartition("-v")
    return key == openvino_key(precision)
