"""Whether plots can be drawn: matplotlib is an extra that serving does without."""

from mesh.domain.errors import MeshError


def check_plotting(option: str) -> None:
    """Raises MeshError when the extra is not installed; `option` is what asks for it."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MeshError(
            f"{option} needs matplotlib, which is not installed",
            hint="pip install 'mesh-serve[plot]'",
        ) from error
