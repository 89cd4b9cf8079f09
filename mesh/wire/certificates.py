"""Certificates of a cell: made by `mesh tls init`, and checked before anybody relies on them.

A folder holds the cell's own authority (`ca.pem`, and `ca.key`, which no machine of the cell needs)
and for each part `PART.pem` and `PART.key`. Both ends of every gRPC connection show theirs; a node
shows that of nodes. Before: the command line. After: `mesh.wire.channel`, which dials and listens
with them.
"""

import os
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mesh.domain.errors import AlreadyExists, InvalidInput, StorageError, system_errors
from mesh.wire.access import NODE_NAME
from mesh.wire.credentials import Tls

AUTHORITY = "ca"
BACKDATED = timedelta(minutes=5)
"""Clocks differ."""


class Part(StrEnum):
    """Who shows a certificate."""

    CONTROLLER = "controller"
    NODE = "node"
    CLIENT = "client"


_NAMES = {Part.CONTROLLER: "mesh controller", Part.NODE: NODE_NAME, Part.CLIENT: "mesh client"}


def make_folder(folder: Path, hosts: Iterable[str], days: int) -> None:
    """An authority, and a certificate for each part; the controller's is valid for these names and
    addresses. Raises AlreadyExists where there is an authority, InvalidInput, StorageError.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (folder / f"{AUTHORITY}.pem").exists():
            raise AlreadyExists(
                f"{folder} has an authority already", hint="choose another folder, or remove it"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mesh authority")])
        made = _builder(name, name, key.public_key(), days).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        made = made.add_extension(_KEY_USES, critical=True)
        _write(folder, AUTHORITY, made.sign(key, hashes.SHA256()), key)
        for part in Part:
            _make(folder, part, hosts, days, name, key)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror}") from error


_KEY_USES = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _make(
    folder: Path,
    part: Part,
    hosts: Iterable[str],
    days: int,
    issuer: x509.Name,
    authority: ec.EllipticCurvePrivateKey,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAMES[part])])
    served = part is Part.CONTROLLER
    uses = [ExtendedKeyUsageOID.SERVER_AUTH if served else ExtendedKeyUsageOID.CLIENT_AUTH]
    if part is Part.NODE:
        # Nodes dial each other for KV blocks. Without a name in it none passes for a controller.
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    made = _builder(subject, issuer, key.public_key(), days)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    if served:
        names = [_general(host) for host in hosts]
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    _write(folder, part, made.sign(authority, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise InvalidInput(f"{host!r} is neither a name nor an address") from error


def _write(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    """The key is its owner's alone from the first moment on."""
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    with os.fdopen(
        os.open(folder / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
    ) as file:
        file.write(private)
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def read_tls(folder: Path, part: Part) -> Tls:
    """What a part shows and whom it trusts. Raises InvalidInput for files that are not there, do
    not belong together, or are not valid now.
    """
    authority, certificate, key = (
        _read(folder / name) for name in (f"{AUTHORITY}.pem", f"{part}.pem", f"{part}.key")
    )
    shown = folder / f"{part}.pem"
    try:
        issuer = x509.load_pem_x509_certificate(authority)
        made = x509.load_pem_x509_certificate(certificate)
        private = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{folder} holds no valid certificates: {error}") from error
    try:
        made.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise InvalidInput(
            f"{shown} was not issued by {folder / AUTHORITY}.pem",
            hint="copy both from the folder that `mesh tls init` made",
        ) from error
    if made.public_key() != private.public_key():
        raise InvalidInput(f"{folder / part}.key is not the key of {shown}")
    now = datetime.now(UTC)
    for one, path in ((issuer, folder / f"{AUTHORITY}.pem"), (made, shown)):
        begins, ends = one.not_valid_before_utc, one.not_valid_after_utc
        if not begins <= now <= ends:
            raise InvalidInput(
                f"{path} is valid from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC, and "
                f"it is {now:%Y-%m-%d %H:%M}",
                hint="`mesh tls init` makes new ones; is this machine's clock right?",
            )
    return Tls(authority=authority, certificate=certificate, key=key, folder=folder, part=str(part))


def _read(path: Path) -> bytes:
    hint = "`mesh tls init DIR` makes a folder of certificates"
    with system_errors(InvalidInput, f"cannot read {path}", hint):
        return path.read_bytes()
