"""`dataclass` for what crosses the ports of the cores: frozen by the type checker, not at run time.

A frozen dataclass sets every field through `object.__setattr__`, and takes three times as long to
make as one that is not. Several such values are made for every token: it is 8 % of what the
simulator computes. mypy refuses assignments to them as to any other; at run time nothing does.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    T = TypeVar("T")

    def dataclass(*, frozen: bool, slots: bool, kw_only: bool) -> Callable[[type[T]], type[T]]:
        """Equal and hashed by its fields, as a frozen one is."""
        return dataclasses.dataclass(slots=slots, kw_only=kw_only, unsafe_hash=frozen)
