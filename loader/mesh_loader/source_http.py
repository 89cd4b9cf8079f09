"""`https://host/path/model.gguf`: what the text means; http_download fetches it.

A GGUF file, or a Hugging Face folder as a tar archive.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from mesh.domain.checks import check_no_credentials
from mesh.domain.errors import InvalidInput

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
FILE_SUFFIXES = (".gguf", *TAR_SUFFIXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFile:
    """A parsed http:// or https:// source."""

    url: str
    name: str
    """Its file name."""


def parse_http(source: str) -> WebFile:
    """Raises InvalidInput for a URL with credentials, without a host, or of no file that mesh
    imports."""
    check_no_credentials(source)
    try:
        parts = urlsplit(source)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidInput(f"{source!r} is no URL: {error}", hint="check host and port") from None
    name = PurePosixPath(unquote(parts.path)).name
    if not host or any(sign in source for sign in " \t\r\n\\") or "/" in name or "\0" in name:
        raise InvalidInput(f"{source!r} is no URL of a file", hint="write https://host/model.gguf")
    if not name.lower().endswith(FILE_SUFFIXES):
        raise InvalidInput(
            f"{source!r} names no file of a kind that mesh fetches: {', '.join(FILE_SUFFIXES)}",
            hint="name one GGUF file, or a tar archive of a Hugging Face folder",
        )
    return WebFile(url=parts._replace(fragment="").geturl(), name=name)
