"""Model sources: what a source text means, before anything is fetched.

`pkg://package/path` is a file in a Python package, `file:///path` a file or folder of this machine,
`hf://org/name@revision` a repository of the Hugging Face hub, `http(s)://host/path` a file of the
web, `s3://bucket/prefix` one of a bucket, or a folder of it. `fetching` brings what they name onto
this disk; model_plan looks at what came, and the store remembers which source it came from.
"""

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from mesh.domain.checks import check_no_credentials
from mesh.domain.errors import (
    InvalidInput,
    NotFound,
    StorageError,
    UnknownSource,
    UnsupportedModel,
)
from mesh.domain.model import WeightPrecision
from mesh.domain.values import dataclass
from mesh_loader.source_pkg import parse_pkg

IR_XML = "openvino_model.xml"


def path_of_file(source: str) -> Path:
    """The absolute path of a file:// source. Raises InvalidInput for a relative path or a host."""
    text = source.removeprefix("file://")
    if text.startswith("localhost/"):
        text = text.removeprefix("localhost")
    if not text.startswith("/") or "\0" in text:
        hint = "write file:// and an absolute path: file:///models/chat.gguf"
        if text:
            hint = f"write the absolute path: file://{Path(text.replace(chr(0), '')).absolute()}"
        raise InvalidInput(f"{source!r} is not an absolute path", hint=hint)
    plain = Path(text)
    # A percent sign may be part of the name or an escape: the name that exists is meant.
    return plain if os.path.lexists(plain) or "%" not in text else Path(unquote(text))


def require_present(source: str, path: Path) -> None:
    """Raises NotFound where nothing lies there, StorageError where it cannot be read."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"{source}: no such file or folder", hint="check the path; it is read on the node"
        ) from None
    except OSError as error:
        raise StorageError(f"{source} cannot be looked at: {error.strerror}") from error
    if not os.access(path, os.R_OK):
        raise StorageError(
            f"{source} cannot be read", hint=f"give this user the right to read {path}"
        )


def check_weights(source: str, weights: WeightPrecision | None) -> None:
    """Raises UnsupportedModel where the model is to be held otherwise than it can be, and it shows
    before anything is read: an OpenVINO IR on this machine.
    """
    if weights is not None and source.startswith("file://"):
        path = path_of_file(source)
        if (path / IR_XML).is_file():
            raise not_held_as(path.name, weights)


def not_held_as(name: str, weights: WeightPrecision) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} is an OpenVINO IR, whose weights are what they were exported as and cannot be "
        f"held as {weights}",
        hint="leave spec.weights out, or deploy the model that it was exported from",
    )


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


DEFAULT_REVISION = "main"

_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_REVISION = re.compile(r"[\w./-]{1,200}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A parsed hf:// source. `revision` is a branch, a tag or a commit."""

    name: str
    revision: str


def parse_hf(source: str) -> Repository:
    """The parts of an hf:// source. Raises InvalidInput for anything but org/name[@revision]."""
    name, separator, revision = source.removeprefix("hf://").partition("@")
    revision = revision if separator else DEFAULT_REVISION
    if not _REPOSITORY.fullmatch(name) or not _REVISION.fullmatch(revision) or ".." in source:
        raise InvalidInput(
            f"{source!r} names no repository of the Hugging Face hub",
            hint="write hf://org/name or hf://org/name@revision",
        )
    return Repository(name=name, revision=revision)


SUPPORTED = (
    "pkg://package/file, file:///path, hf://org/name@revision, https://host/file or "
    "s3://bucket/prefix"
)
REMOTE = ("http://", "https://", "s3://")
"""Those that are fetched in parts, which outlive a killed import."""


def check_source(source: str) -> None:
    """Raises UnknownSource, or InvalidInput, for a text that can be no source; touches no disk."""
    scheme, separator, _ = source.partition("://")
    if not separator:
        hint = f"write {SUPPORTED}"
        if source.startswith(("/", "./", "../", "~")):
            hint = f"for a path of this machine write file://{Path(source).expanduser().absolute()}"
        raise UnknownSource(f"{source!r} is no model source: it has no scheme", hint=hint)
    if scheme == "pkg":
        parse_pkg(source)
    elif scheme == "file":
        path_of_file(source)
    elif scheme == "hf":
        parse_hf(source)
    elif scheme in ("http", "https"):
        parse_http(source)
    elif scheme == "s3":
        parse_s3(source)
    else:
        raise UnknownSource(
            f"{source!r} has the scheme {scheme}, which mesh does not know", hint=f"use {SUPPORTED}"
        )
