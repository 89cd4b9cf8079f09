"""Reads YAML text into plain values, and remembers the line on which every field stands.

Only what a manifest needs: mappings, lists, text, numbers, booleans. What PyYAML would let pass in
silence (a field written twice) or crash on (an integer tag on text, a thousand brackets) is
InvalidInput here, with line and column. `specs` gives the values their meaning.
"""

from collections.abc import Iterator, Mapping

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from mesh.domain.errors import InvalidInput
from mesh.domain.values import dataclass

MANIFEST_BYTES_MAX = 256 * 1024
DEPTH_MAX = 16
"""Levels of nesting. A manifest has three; far deeper ones would exhaust the parser's stack."""
DOCUMENTS_MAX = 256
"""Documents of one file, empty ones left out."""
FIELDS_MAX = 10_000
"""Fields and list items of one document, aliases counted every time they are used."""

Path = tuple[str | int, ...]

# What PyYAML's constructors let out besides YAMLError when a scalar does not suit its tag.
_CONSTRUCTION_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One YAML document: its plain value, and the line (from 1) of every path in it."""

    value: object
    line: int
    lines: Mapping[Path, int]

    def line_of(self, path: Path) -> int:
        """The line of a field, or of the nearest field around it."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return self.line


def read_documents(raw: bytes, origin: str) -> list[Document]:
    """The documents of a file, empty ones left out. Raises InvalidInput naming `origin`."""
    text = _decode(raw, origin)
    try:
        return list(_documents(text, origin))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{origin}:{mark.line + 1}:{mark.column + 1}" if mark else origin
        raise InvalidInput(
            f"{where}: not valid YAML: {error.problem or error.context}",
            hint="mind the indentation (spaces, no tabs) and quote text that holds ': ' or '#'",
        ) from error
    except yaml.YAMLError as error:
        raise InvalidInput(
            f"{origin}: not valid YAML: {' '.join(str(error).split())}",
            hint="write the manifest as plain text without control characters",
        ) from error
    except RecursionError as error:
        raise _too_deep(origin) from error


def _decode(raw: bytes, origin: str) -> str:
    if len(raw) > MANIFEST_BYTES_MAX:
        raise InvalidInput(
            f"{origin}: {len(raw)} bytes, more than the {MANIFEST_BYTES_MAX} of a manifest",
            hint="name the model file in spec.source; the manifest itself is a few lines",
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{origin}: byte {error.start} is not valid UTF-8",
            hint="save the file as UTF-8",
        ) from error


def _documents(text: str, origin: str) -> Iterator[Document]:
    loader, count = yaml.SafeLoader(text), 0
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is None:
                continue
            lines: dict[Path, int] = {}
            _walk(node, (), lines, origin)
            value = _construct(loader, node, origin)
            count += value is not None
            if count > DOCUMENTS_MAX:
                raise InvalidInput(
                    f"{origin}: more than {DOCUMENTS_MAX} documents",
                    hint="deploy them from several files",
                )
            if value is not None:
                yield Document(value=value, line=node.start_mark.line + 1, lines=lines)
    finally:
        loader.dispose()


def _construct(loader: yaml.SafeLoader, node: Node, origin: str) -> object:
    try:
        return loader.construct_document(node)
    except _CONSTRUCTION_ERRORS as error:
        line = node.start_mark.line + 1
        raise InvalidInput(
            f"{origin}:{line}: a value of this document does not fit its type",
            hint="use plain text, numbers, booleans, lists and mappings; quote text such as dates",
        ) from error


def _walk(node: Node, path: Path, lines: dict[Path, int], origin: str) -> None:
    """Record the line of every field below `node`, and refuse what cannot be meant."""
    if len(path) > DEPTH_MAX:
        raise _too_deep(origin)
    if len(lines) > FIELDS_MAX:
        raise InvalidInput(
            f"{origin}: more than {FIELDS_MAX} fields in one document",
            hint="write one model in a document; take out anchors and aliases",
        )
    if isinstance(node, MappingNode):
        _walk_mapping(node, path, lines, origin)
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _walk(item, (*path, index), lines, origin)


def _walk_mapping(node: MappingNode, path: Path, lines: dict[Path, int], origin: str) -> None:
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise InvalidInput(
                f"{origin}:{key.start_mark.line + 1}: a field's name must be plain text",
                hint="write `name: value`",
            )
        field: Path = (*path, str(key.value))
        line = key.start_mark.line + 1
        if field in lines:
            raise InvalidInput(
                f"{origin}:{line}: {path_text(field)}: written twice, first on line {lines[field]}",
                hint="keep one of the two",
            )
        lines[field] = line
        _walk(value, field, lines, origin)


def path_text(path: Path) -> str:
    """`spec.devices[1]` for ("spec", "devices", 1)."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _too_deep(origin: str) -> InvalidInput:
    return InvalidInput(
        f"{origin}: nested more than {DEPTH_MAX} levels deep",
        hint="a manifest has apiVersion, kind, metadata and spec; `mesh deploy --help` shows one",
    )
