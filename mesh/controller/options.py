"""The controller's options, from which its parser, `mesh controller` and `mesh up` derive."""

from mesh.domain.limits import TURN_S_MAX
from mesh.runtime.options import DEFAULT_ADDRESS, GRACE_S_LARGEST, HOME, Option
from mesh.wire.credentials import TLS_VARIABLE

HTTP_OFF = "off"
TURN_S_LARGEST = 1
"""The largest --turn: no other event is looked at before a turn ends."""
JOIN_MS_LARGEST = 1000
"""The largest --join-ms: a reader sees the text jump long before."""

STATE = Option(
    flag="--state",
    metavar="URL",
    help="The registry, as postgresql://USER@HOST/DATABASE?cell=NAME; several controllers may "
    "share one, and one of them leads. Default: SQLite under --home.",
)
OPTIONS = (
    Option(
        flag="--listen",
        metavar="HOST:PORT",
        default=DEFAULT_ADDRESS,
        help="Where clients and nodes reach it.",
    ),
    Option(
        flag="--http",
        metavar="HOST:PORT",
        default=HTTP_OFF,
        help="Where clients of OpenAI's protocol reach it; off: nowhere.",
    ),
    Option(
        flag="--http-host-allowed",
        metavar="NAME",
        repeatable=True,
        help="A name by which HTTP may be asked without keys, beside this machine's; repeatable.",
    ),
    Option(
        flag="--http-cors",
        metavar="ORIGIN",
        repeatable=True,
        help="Whose pages may ask by HTTP, like https://chat.example; * for all; repeatable.",
    ),
    Option(flag="--no-page", kind=bool, help="Serve no page to browsers at the HTTP address."),
    Option(
        flag="--policy",
        metavar="NAME|FILE.py",
        help="How requests are placed and take turns: llm-mesh (the default) or fcfs.",
    ),
    Option(
        flag="--turn",
        metavar="SECONDS",
        kind=float,
        most=TURN_S_LARGEST,
        default=f"{TURN_S_MAX:g}",
        help="Decodes of an instance that take no longer together are one turn; default: each is "
        "one.",
    ),
    Option(
        flag="--join-ms",
        metavar="MS",
        kind=float,
        most=JOIN_MS_LARGEST,
        default="0",
        help="An answer's tokens that come within so long go out together, none after it is due.",
    ),
    Option(
        flag="--sources",
        metavar="ROLE=RULE,…",
        repeatable=True,
        help="What a role, tenant or admin, may deploy from: all, pkg, file, hf, https, …, or the "
        "beginning of a source, like http://HOST, which may then be private; repeatable.",
    ),
    Option(
        flag="--tls",
        metavar="DIR",
        environ=TLS_VARIABLE,
        help="As of `mesh tls init DIR`.",
    ),
    Option(flag="--keys", kind=bool, help="Each call needs a key, on the loopback, too."),
    Option(flag="--open", kind=bool, help="None does, off the loopback either."),
    Option(
        flag="--grace-s",
        metavar="SECONDS",
        kind=float,
        most=GRACE_S_LARGEST,
        default="0",
        help="After SIGTERM, open answers may end within so long; new calls are refused.",
    ),
    Option(
        flag="--nodes-wanted",
        metavar="KIND=LEAST..MOST",
        repeatable=True,
        help="How many nodes of a kind the cell may want of whoever starts and stops them, by GET "
        "/api/v1/nodes/wanted, like cpu=1..8; repeatable.",
    ),
    Option(flag="--journal", metavar="FILE", help="Write every decision of the cell there."),
    STATE,
    HOME,
)
