"""A field of a state entry is written by the methods of its class, and nowhere else in the cores.

Fields are collected from the classes of the state modules. What counts as a write: assignment,
deletion, and whatever changes a container that a field holds, under a local name, too.
"""

import ast
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "mesh" / "core"
STATE = (
    *sorted((CORE / "controller" / "state").glob("*.py")),
    CORE / "node" / "local_instance.py",
    CORE / "node" / "state.py",
    CORE / "node" / "context.py",
)
MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "remove", "reverse", "rotate", "setdefault", "sort", "update"),
}
MUTATING_FUNCTIONS = {"insort", "insort_left", "insort_right", "heappush", "heappop", "heapify"}
CONTAINERS = ("dict", "list", "deque", "set")


def fields() -> tuple[set[str], set[str]]:
    """All fields, by name; and those that hold containers."""
    every, containers = set(), set()
    for path in STATE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        declared = [node for of in classes for node in of.body if isinstance(node, ast.AnnAssign)]
        of_self = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign | ast.AnnAssign) and _self_field(node)
        ]
        for node in (*declared, *of_self):
            name = _self_field(node) or ast.unparse(node.target)  # type: ignore[union-attr]
            every.add(name)
            kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            made = isinstance(node.value, ast.Dict | ast.DictComp | ast.List | ast.ListComp)
            if made or kind.strip("\"'").startswith(CONTAINERS):
                containers.add(name)
    return every, containers


def _self_field(node: ast.Assign | ast.AnnAssign) -> str:
    """The name of the field that a method gives its own object by this, if it does."""
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    return target.attr if own and isinstance(target, ast.Attribute) else ""


FIELDS, CONTAINER_FIELDS = fields()


def written(tree: ast.AST) -> list[str]:
    """Writes to fields of others, as `line: text`."""
    found = []
    for function in [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))]:
        names = _containers_under_other_names(function)
        found += [
            f"{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(function)
            if isinstance(node, ast.expr | ast.stmt) and _writes(node, names)
        ]
    return sorted(set(found))


def _writes(node: ast.AST, names: set[str]) -> bool:
    def is_container(of: ast.expr) -> bool:
        return _of_other(of, CONTAINER_FIELDS) or (isinstance(of, ast.Name) and of.id in names)

    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            return _of_other(node, FIELDS)
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return is_container(value)
        case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in MUTATORS:
            return is_container(value)
        case ast.Call(func=ast.Name(id=name), args=[first, *_]):
            return (name in MUTATING_FUNCTIONS and is_container(first)) or name == "setattr"
        case ast.AugAssign(target=ast.Name(id=name)):
            return name in names
        case _:
            return False


def _of_other(node: ast.expr, among: set[str]) -> bool:
    """Whether it is a field, and not one that a method has of its own object."""
    if not isinstance(node, ast.Attribute) or node.attr not in among:
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id == "self")


def _containers_under_other_names(function: ast.AST) -> set[str]:
    """Local names that are given a container of an entry, by itself or in a tuple."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                found |= {
                    name.id
                    for name, value in pairs
                    if isinstance(name, ast.Name) and _of_other(value, CONTAINER_FIELDS)
                }
    return found


def test_the_fields_are_those_of_the_entries() -> None:
    known = {"version", "requests", "kept_run_queue", "linked", "validations_left", "_measured"}
    assert known <= FIELDS
    assert {"requests", "queue", "released", "resizing", "_measured"} <= CONTAINER_FIELDS


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda p: str(p.relative_to(CORE)))
def test_fields_are_written_by_their_owners(path: Path) -> None:
    assert written(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        *("node.version += 1", "node.state = NodeState.LOST", "instance.tokens, count = 0, 1"),
        *("entry.queue[0].attempt = 2", "entry.queue.append(request)"),
        *("insort(entry.queue, request)", "del cell.requests[request_id]", "cell.links[0] = node"),
        *("self._node.steps_started -= 1", "self.cell.released.pop(instance_id)"),
        "requests = instance.requests\n    del requests[request_id]",
        "count, queue = 1, entry.queue\n    queue.popleft()",
        "tokens = request.output_tokens\n    tokens += more",
        *("for request.tokens in (1, 2): pass", "setattr(node, name, 1)"),
    ],
)
def test_a_write_from_elsewhere_is_found(line: str) -> None:
    assert written(ast.parse(f"def f():\n    {line}"))


@pytest.mark.parametrize(
    "line",
    [
        "self.tokens += 1",
        "self.requests[request_id] = request",
        "first = entry.queue[0]",
        "requests = list(instance.requests.values())\n    requests.append(request)",
        "batch = len(instance.requests)\n    batch += 1",
        "entry.rank(instance)",
    ],
)
def test_reading_and_writing_what_is_ones_own_are_allowed(line: str) -> None:
    assert written(ast.parse(f"def f():\n    {line}")) == []
