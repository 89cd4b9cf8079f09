"""Why a dial fails although somebody answers: gRPC says no more than that nobody does."""

import socket
import ssl

from mesh.domain.errors import Unavailable
from mesh.wire.channel import parse_address
from mesh.wire.credentials import Tls

HANDSHAKE_S_MAX = 3.0
REFUSED_S_MAX = 0.5
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The bytes with which a client of HTTP/2 begins (RFC 9113 §3.4); a server of HTTP/1 answers that
it is none.
"""
_HTTP_1 = b"HTTP/1."
_HTTP_2 = "h2"
"""What every server of gRPC agrees to in the handshake of TLS, and none of HTTP/1."""
_TLS_WANTED, _HTTP, _NO_TLS = "TLS is wanted", "HTTP is served", "no TLS is spoken"
_NO_TLS_REASONS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING")


def why_refused(address: str, tls: Tls | None) -> Unavailable | None:
    """None where it is not TLS that fails, or nobody answers. `tls`: what was shown; None where
    nothing was, as to a cell without TLS. Waits for HANDSHAKE_S_MAX at most.
    """
    said = _answered_plainly(address) if tls is None else _explain(address, tls)
    if said == _TLS_WANTED:
        return Unavailable(
            f"the controller at {address} speaks TLS, and no certificate was shown to it",
            hint="name the folder that `mesh tls init` made: `mesh --tls DIR …`, or MESH_TLS",
        )
    if said == _HTTP:
        return Unavailable(
            f"what answers at {address} serves HTTP, not the controller's gRPC",
            hint="name the address of --listen instead of that of --http",
        )
    if said == _NO_TLS:
        return Unavailable(
            f"no TLS with the controller at {address}: it does not speak TLS",
            hint="leave --tls and MESH_TLS out, or start the cell with --tls, too",
        )
    if not said:
        return None
    return Unavailable(
        f"no TLS with the controller at {address}: {said}",
        hint="both ends need certificates of one `mesh tls init`, and the controller's must be "
        "valid for the name that it is called by",
    )


def _answered_plainly(address: str) -> str:
    """What answers to who shows nothing, empty where that is not to be told."""
    host, port = parse_address(address)
    unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), HANDSHAKE_S_MAX) as plain:
            plain.settimeout(REFUSED_S_MAX)
            plain.sendall(_PREFACE)
            if plain.recv(len(_HTTP_1)) == _HTTP_1:
                return _HTTP
    except OSError:
        pass  # whoever speaks TLS alone hangs up, or waits for more
    try:
        with (
            socket.create_connection((host, port), HANDSHAKE_S_MAX) as plain,
            unchecked.wrap_socket(plain, server_hostname=host),
        ):
            return _TLS_WANTED
    except ssl.SSLError as error:
        # An alert is an answer of TLS; the wrong version is what any other protocol looks like.
        return _TLS_WANTED if "ALERT" in (error.reason or "") else ""
    except OSError:
        return ""


def _explain(address: str, tls: Tls) -> str:
    host, port = parse_address(address)
    try:
        context = ssl.create_default_context(cadata=tls.authority.decode())
        context.load_cert_chain(tls.folder / f"{tls.part}.pem", tls.folder / f"{tls.part}.key")
        context.set_alpn_protocols([_HTTP_2])
        with (
            socket.create_connection((host, port), HANDSHAKE_S_MAX) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            if secured.selected_alpn_protocol() != _HTTP_2:
                return _HTTP
            return "" if _is_served(secured) else f"it does not accept {tls.folder}/{tls.part}.pem"
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not accepted: {error.verify_message}"
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        return _NO_TLS if reason in _NO_TLS_REASONS else reason.replace("_", " ").lower()
    except OSError:
        return ""


def _is_served(secured: ssl.SSLSocket) -> bool:
    """TLS 1.3 tells a client that its certificate is refused after the handshake, if at all."""
    secured.settimeout(REFUSED_S_MAX)
    try:
        return bool(secured.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False
