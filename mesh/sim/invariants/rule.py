"""A rule that holds, or is broken: what all checks of invariants are made of."""


class RuleBroken(AssertionError):
    """Something that holds of every cell does not hold of this one: a fault of mesh."""


def hold(rule: object, broken: str, *values: object) -> None:
    """Raises RuleBroken with what is said of it, `values` put in the place of its braces."""
    if not rule:
        raise RuleBroken(broken.format(*values))
