"""Writes docs/lifecycle.md from the transition tables (`python scripts/gen_lifecycle.py`)."""

from pathlib import Path

from mesh.domain.lifecycle import TABLES, Table

TARGET = Path(__file__).resolve().parent.parent / "docs" / "lifecycle.md"
HEAD = """# State machines

Generated from the tables in `mesh/domain/lifecycle.py` by `python scripts/gen_lifecycle.py`; a test
fails when this page is not current. The cores change a state only along these arrows.
"""


def diagram(name: str, table: Table) -> str:
    """A Mermaid state diagram: the first state starts, as do those that no other leads to; those
    without a way out end.
    """
    led_to = {to for following in table.values() for to in following} - {next(iter(table))}
    lines = [f"    [*] --> {state}" for state in table if state not in led_to]
    for state, following in table.items():
        lines += [f"    {state} --> {to}" for to in following]
        if not following:
            lines.append(f"    {state} --> [*]")
    body = "\n".join(lines)
    return f"\n## {name.capitalize()}\n\n```mermaid\nstateDiagram-v2\n{body}\n```\n"


def page() -> str:
    return HEAD + "".join(diagram(name, table) for name, table in TABLES.items())


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
