"""The options of a front, from which its parser and `mesh front` derive."""

from mesh.controller.options import OPTIONS as CONTROLLER_OPTIONS
from mesh.domain.checks import check_name
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import CellName
from mesh.domain.values import replace
from mesh.runtime.options import Option
from mesh.wire.channel import parse_address

CONTROLLERS_OWN = ("--policy", "--turn", "--sources", "--state", "--nodes-wanted")
"""What a front has no use for."""
HELP = {
    "--listen": "Where clients reach it.",
    "--journal": "Write every decision of the front there.",
}
OPTIONS = (
    Option(
        flag="--cells",
        metavar="NAME=HOST:PORT[,…]",
        repeatable=True,
        help="A cell, and the addresses of all of its controllers; repeatable.",
    ),
    *(
        replace(option, help=HELP[option.flag]) if option.flag in HELP else option
        for option in CONTROLLER_OPTIONS
        if option.flag not in CONTROLLERS_OWN
    ),
    Option(
        flag="--key-file",
        metavar="FILE",
        help="The key of an operator of the cells; default: MESH_KEY.",
    ),
)


def read_cells(texts: list[str]) -> dict[CellName, tuple[str, ...]]:
    """The cells by their names. Raises InvalidInput."""
    hint = "write it as east=10.0.0.1:7070,10.0.0.2:7070"
    if not texts:
        raise InvalidInput("a front is before no cell", hint=f"give --cells: {hint}")
    cells: dict[CellName, tuple[str, ...]] = {}
    seen: dict[tuple[str, int], str] = {}
    for text in texts:
        name, given, addresses = text.partition("=")
        if not given:
            raise InvalidInput(f"--cells: {text!r} has no name", hint=hint)
        check_name(name, "the cell's name")
        if name in cells:
            raise InvalidInput(f"--cells: {name} is named twice", hint="give each cell once")
        found = tuple(one.strip() for one in addresses.split(","))
        for address in found:
            at = parse_address(address)
            if at in seen:
                raise InvalidInput(
                    f"--cells: {address} is of {name} and of {seen[at]}",
                    hint="a controller is of one cell, and is named once",
                )
            seen[at] = name
        cells[CellName(name)] = found
    return cells
