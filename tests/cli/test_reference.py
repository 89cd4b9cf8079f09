"""docs/cli-reference.md is what the commands say of themselves."""

from scripts.gen_cli import TARGET, page


def test_the_reference_is_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == page(), "run python scripts/gen_cli.py"
