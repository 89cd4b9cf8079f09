"""`s3://bucket/prefix`: what the text means; s3_download fetches it.

One object, a GGUF file or a tar archive, or all objects of a model's folder right below the prefix.
"""

import re
from dataclasses import dataclass

from mesh.domain.checks import check_no_credentials
from mesh.domain.errors import InvalidInput

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A parsed s3:// source."""

    bucket: str
    key: str
    """The key of an object or, without its last slash, the prefix of the objects below it; empty
    for the whole bucket.
    """


def parse_s3(source: str) -> Prefix:
    """Raises InvalidInput for anything but s3://bucket[/prefix]."""
    check_no_credentials(source)
    bucket, _, key = source.removeprefix("s3://").partition("/")
    if not _BUCKET.fullmatch(bucket) or key.startswith("/") or "\0" in key:
        raise InvalidInput(
            f"{source!r} names nothing in a bucket",
            hint="write s3://bucket/model.gguf, or s3://bucket/folder of a Hugging Face folder",
        )
    return Prefix(bucket=bucket, key=key.rstrip("/"))
