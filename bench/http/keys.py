"""What a key adds to an answer: the same call of two cells, of which one wants keys.

Neither has a node, and the call is for a model that is not there: it goes all the way through the
gate, the limits of its tenant and the gateway, and no engine's jitter hides what that takes.
"""

import http.client
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

from bench.cells import keys_shown, local_cell
from mesh.controller.keys import KeyBook
from mesh.domain.access import Role, TenantLimits, TenantName
from mesh.domain.errors import MeshError

CALLS = 500
WARM = 50
TENANT = TenantName("bench")
LIMITS = TenantLimits(requests_per_s=1e6, tokens_per_min=1e9, running=1000)
BODY = b'{"model": "none", "prompt": "hi"}'


def keys_added_ms() -> float:
    """Median over pairs of calls, one of each cell; who is asked first changes."""
    with ExitStack() as opened:
        home = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        opened.enter_context(keys_shown(home))
        with closing(KeyBook(home / "controller")) as book:
            secret, _ = book.create(Role.TENANT, TENANT)
            book.limit(TENANT, LIMITS)
        lines = []
        for keys in (False, True):
            cell = opened.enter_context(
                local_cell(nodes=(), http="127.0.0.1:0", keys=keys, home=home if keys else None)
            )
            line = http.client.HTTPConnection(cell.http_address or "")
            opened.callback(line.close)
            lines.append(line)
        added = []
        for number in range(WARM + CALLS):
            took = {n: _took_ms(lines[n], secret) for n in ((0, 1) if number % 2 else (1, 0))}
            added.append(took[1] - took[0])
    return median(added[WARM:])


def _took_ms(line: http.client.HTTPConnection, secret: str) -> float:
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    begun_s = time.perf_counter()
    line.request("POST", "/v1/completions", BODY, headers)
    answer = line.getresponse()
    answer.read()
    took_s = time.perf_counter() - begun_s
    if answer.status != http.client.NOT_FOUND:
        raise MeshError(f"a model that is not there was answered with {answer.status}")
    return 1e3 * took_s
