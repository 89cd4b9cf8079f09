"""Why TLS with a controller fails, in words: gRPC says no more than that nobody answers."""

import socket
import ssl

from mesh.domain.errors import Unavailable
from mesh.wire.channel import parse_address
from mesh.wire.credentials import Tls

HANDSHAKE_S_MAX = 3.0
REFUSED_S_MAX = 0.5


def why_refused(address: str, tls: Tls) -> Unavailable | None:
    """None where TLS does not fail, or nobody answers. Waits for HANDSHAKE_S_MAX at most."""
    said = _said(address, tls)
    if not said:
        return None
    return Unavailable(
        f"no TLS with the controller at {address}: {said}",
        hint="both ends need certificates of one `mesh tls init`, and the controller's must be "
        "valid for the name that it is called by",
    )


def _said(address: str, tls: Tls) -> str:
    host, port = parse_address(address)
    try:
        context = ssl.create_default_context(cadata=tls.authority.decode())
        context.load_cert_chain(tls.folder / f"{tls.part}.pem", tls.folder / f"{tls.part}.key")
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, port), HANDSHAKE_S_MAX) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            return "" if _is_served(secured) else f"it does not accept {tls.folder}/{tls.part}.pem"
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not accepted: {error.verify_message}"
    except ssl.SSLError as error:
        return (error.reason or str(error)).replace("_", " ").lower()
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
