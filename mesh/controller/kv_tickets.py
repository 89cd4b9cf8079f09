"""Tickets for transfers of KV blocks between nodes: random, and told to the two nodes alone.

The core draws nothing at random, and its journal holds no secrets: it names a ticket. On their way
to the nodes both commands with that name get the same random ticket. Before: the core's `OfferKv`
to the source, and then `SubmitRequest` to the target. After: `node_link`.
"""

import secrets

from mesh.domain.limits import forget_oldest
from mesh.domain.messages import NodeCommand, OfferKv, SubmitRequest
from mesh.domain.values import replace

TICKETS_MAX = 1024
"""Tickets of which the target has not been told yet; it is told in the same event."""


class KvTickets:
    def __init__(self) -> None:
        self._drawn: dict[str, str] = {}
        """By name."""

    def drawn(self, command: NodeCommand) -> NodeCommand:
        """The command, with the ticket that it names where it names one. A name that no offer came
        before gets a ticket that opens nothing.
        """
        if isinstance(command, OfferKv):
            ticket = self._drawn[command.ticket] = secrets.token_hex(16)
            forget_oldest(self._drawn, TICKETS_MAX)
            return replace(command, ticket=ticket)
        if isinstance(command, SubmitRequest) and command.order.kv is not None:
            kv = command.order.kv
            ticket = self._drawn.pop(kv.ticket, "") or secrets.token_hex(16)
            return replace(command, order=replace(command.order, kv=replace(kv, ticket=ticket)))
        return command
