"""What this process shows a cell: its key, and its certificate.

The composition roots of the command line and of nodes read it and set it once; whoever dials a
controller from here on shows it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from mesh.domain.errors import InvalidInput
from mesh.domain.values import dataclass
from mesh.wire.access import AUTHORIZATION

KEY_VARIABLE = "MESH_KEY"
TLS_VARIABLE = "MESH_TLS"
KEY_CHARS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM, as read from `folder`; see `mesh.wire.certificates`."""

    authority: bytes
    certificate: bytes
    key: bytes
    folder: Path
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    key: str = ""
    tls: Tls | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The gRPC metadata of every call."""
        return ((AUTHORIZATION, f"Bearer {self.key}"),) if self.key else ()


def client_tls(folder: Path) -> Tls:
    """What a client shows, from a folder of `mesh tls init`. Raises InvalidInput. Cryptography is
    imported here: few start-ups pay for it.
    """
    from mesh.wire.certificates import Part, read_tls

    return read_tls(folder, Part.CLIENT)


_shown = Credentials()


def credentials() -> Credentials:
    return _shown


def show(what: Credentials) -> None:
    """To every cell that is dialled from now on."""
    global _shown
    _shown = what


def read_credentials(
    environ: Mapping[str, str], key_file: Path | None, tls: Tls | None = None
) -> Credentials:
    """The key in the file, else that in MESH_KEY, if any. Raises InvalidInput."""
    key, where = environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
    if key_file is not None:
        where = str(key_file)
        try:
            key = key_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "no UTF-8"
            raise InvalidInput(
                f"cannot read the key in {key_file}: {reason}", hint="`mesh key create` shows one"
            ) from error
    key = key.strip()
    if len(key) > KEY_CHARS_MAX or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidInput(f"{where} holds no key", hint="`mesh key create` shows one, on a line")
    return Credentials(key=key, tls=tls)
