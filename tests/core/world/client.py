"""One invocation, as its caller sees it."""

from mesh.domain.actions import DeliverTokens
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import Request
from tests.core.world.engine import answer_tokens, token_at


class Client:
    """Checks what it is told as it is told."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.ended = False
        self.gone = False
        self.reason: RefusalReason | FinishReason | None = None

    def take(self, told: DeliverTokens) -> None:
        assert not self.gone, "told after it was cancelled"
        assert not self.ended, "told after its end"
        outputs = told.outputs
        assert outputs.first_index == len(self.tokens), "a token was lost or came twice"
        self.tokens.extend(outputs.token_ids)
        expected = [token_at(self.request.prompt_tokens, i) for i in range(len(self.tokens))]
        assert self.tokens == expected
        if outputs.finish is not None:
            wanted = answer_tokens(self.request.prompt_tokens, self.request.sampling.max_tokens)
            assert len(self.tokens) == wanted
            self.ended, self.reason = True, outputs.finish

    def refused(self, reason: RefusalReason) -> None:
        assert not self.gone
        assert not self.ended, "ended twice"
        self.ended, self.reason = True, reason
