"""`dataclass` and `replace` for values: the standard library's to the type checker, and a msgspec
Struct, which C code makes and compares, at run time.

The standard library writes and compiles each dataclass's methods while the module is imported, 1 ms
a class, which was nearly half of a process's start. A frozen one then sets every field through
`object.__setattr__`. A Struct is defined, made and replaced in a tenth of the time.
`dataclasses.fields`, `asdict` and `is_dataclass` take it as they take any other dataclass.

What a Struct cannot be stays with `dataclasses`: a class without slots, with a base class that has
fields, or with fields that `__init__` does not take.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace
else:
    from msgspec import Struct, field, structs

    class _Fields:
        """`__dataclass_fields__` of a Struct, for which the standard library is asked when somebody
        first wants them: few classes' fields are ever looked at.
        """

        def __init__(self, body: dict[str, Any]) -> None:
            self._body = body

        def __get__(self, _: Any, owner: type) -> dict[str, dataclasses.Field[Any]]:
            # Its methods, which would take a millisecond to compile, are not wanted.
            bare = dataclasses.dataclass(kw_only=True, init=False, repr=False, eq=False)
            twin = bare(type(owner.__name__, (), self._body))
            owner.__dataclass_fields__ = twin.__dataclass_fields__
            return twin.__dataclass_fields__

    def dataclass(
        *,
        frozen: bool = False,
        slots: bool = False,
        kw_only: bool = False,
        eq: bool = True,
        order: bool = False,
        weakref_slot: bool = False,
    ) -> Callable[[type], type]:
        """Make the class a Struct. Raises TypeError for what a Struct cannot be."""

        def made(cls: type) -> type:
            bases = tuple(base for base in cls.__bases__ if base is not object)
            if not slots or any(map(dataclasses.is_dataclass, bases)):
                raise TypeError(f"{cls.__qualname__} has no slots, or a base with fields")
            body = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
            members = {name: _member(cls, name, value) for name, value in body.items()}
            return type(Struct)(
                cls.__name__,
                (Struct, *bases),
                members | {"__dataclass_fields__": _Fields(body)},
                frozen=frozen,
                kw_only=kw_only,
                eq=eq,
                order=order,
                weakref=weakref_slot,
            )

        return made

    def replace(value: Any, /, **changes: Any) -> Any:
        """A copy with other values of some fields. Errors: as in `dataclasses.replace`."""
        if isinstance(value, Struct):
            return structs.replace(value, **changes)
        return dataclasses.replace(value, **changes)

    def _member(cls: type, name: str, value: Any) -> Any:
        """What stands for a member of the class's body in the Struct's."""
        if not isinstance(value, dataclasses.Field):
            return value
        if not (value.init and value.compare and value.repr):
            raise TypeError(
                f"{cls.__qualname__}.{name}: a Struct initialises and compares all fields"
            )
        if value.default_factory is not dataclasses.MISSING:
            return field(default_factory=value.default_factory)
        return field() if value.default is dataclasses.MISSING else field(default=value.default)
