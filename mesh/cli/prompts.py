"""Where a prompt comes from: the argument, a file or standard input, and always valid UTF-8."""

import sys

import click

from mesh.cli.options import checked_text, decoded
from mesh.domain.errors import InvalidInput

PROMPT_BYTES_MAX = 2 * 1024 * 1024
"""Far above any context; a larger prompt would not fit a message of the wire."""
STANDARD_INPUT = "-"


def read_prompt(argument: str | None, file: str | None) -> str:
    """Raises InvalidInput when it cannot be read or is not UTF-8, and click.UsageError when it is
    given twice or not at all.
    """
    if argument is not None and file is not None:
        raise click.UsageError("the prompt is given twice: as PROMPT and by --file")
    if argument is not None and argument != STANDARD_INPUT:
        return checked_text(argument, "the prompt")
    if file is not None and file != STANDARD_INPUT:
        return decoded(_bounded(_read(file), file), file)
    if argument is None and file is None and sys.stdin.isatty():
        raise click.UsageError("no prompt: give PROMPT, --file, or - for standard input")
    raw = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
    return decoded(_bounded(raw, "standard input"), "standard input").removesuffix("\n")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(PROMPT_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidInput(
            f"{path}: {(error.strerror or str(error)).lower()}",
            hint="name a file with the prompt, or - for standard input",
        ) from error


def _bounded(raw: bytes, what: str) -> bytes:
    if len(raw) > PROMPT_BYTES_MAX:
        raise InvalidInput(
            f"{what} holds more than the {PROMPT_BYTES_MAX} bytes of a prompt",
            hint="shorten it: no model's context holds that many tokens",
        )
    return raw
