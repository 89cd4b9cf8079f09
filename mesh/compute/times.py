"""Predicted iteration times: a profile, times how much slower its node is at the moment.

Run queues (`mesh.policy.rules`) ask for decode and prefill times by themselves; the node's
correction asks for whole iterations as they were computed.
"""

from bisect import bisect_right

from mesh.domain.profile import IterationShape, Profile


class Times:
    """Predictions for one model on one node. `factor` multiplies all of them: the node's correction
    and, in schedules, an overestimate.
    """

    __slots__ = ("_decode", "_prefill", "factor")

    def __init__(self, profile: Profile, factor: float = 1.0) -> None:
        self._prefill = profile.prefill
        self._decode = profile.decode
        self.factor = factor

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """Seconds of one decode of `batch` requests that attend to `context_tokens` each."""
        return self._decode.at(batch, context_tokens) * self.factor

    def profiled_decode_s(self, batch: int, context_tokens: float) -> float:
        """The same by the profile alone."""
        return self._decode.at(batch, context_tokens)

    def prefill_s(self, tokens: int, past_tokens: float) -> float:
        """Seconds of `tokens` prompt tokens in an iteration of their own."""
        return self._prefill.at(tokens, past_tokens) * self.factor

    def chunk_s(self, tokens: int, past_tokens: float, batch: int) -> float:
        """Seconds by which `tokens` prompt tokens lengthen a decode iteration of `batch` requests.

        The weights pass through memory once for both; that part is what an iteration of a single
        token takes. Nor is it quicker than a prefill of as many rows as both have together, which
        tells where it is computation that takes the time. Measured with a 135M model on a CPU, the
        greater of the two is 0 to 9 % below what a mixed iteration takes.
        """
        prefill_s = self._prefill.at(tokens, past_tokens)
        rows_s = self._prefill.at(tokens + batch, past_tokens)
        decode_s = self._decode.at(batch, self._decode.columns[0])
        base_s = min(self._decode.seconds[0][0], self._prefill.seconds[0][0])
        added_s = max(prefill_s - base_s, rows_s - decode_s, 0.0)
        return min(added_s, prefill_s) * self.factor

    def chunk_tokens(self, spare_s: float, past_tokens: int, batch: int, most: int) -> int:
        """The largest chunk, of `most` tokens at most, that lengthens a decode iteration of `batch`
        requests by `spare_s` or less.
        """

        def seconds(tokens: int) -> float:
            return self.chunk_s(tokens, past_tokens, batch)

        if seconds(most) <= spare_s:
            return most
        return bisect_right(range(1, most), spare_s, key=seconds)

    def iteration_s(self, shape: IterationShape) -> float:
        """Seconds of any iteration; 0 for an empty one."""
        return self.seconds(
            shape.prefill_tokens,
            shape.prefill_past_tokens,
            shape.decode_batch,
            shape.decode_context_tokens,
        )

    def seconds(self, tokens: int, past_tokens: int, batch: int, context_tokens: int) -> float:
        """The same of a shape in its parts."""
        if not batch:
            return self.prefill_s(tokens, past_tokens) if tokens else 0.0
        decode_s = self._decode.at(batch, context_tokens) * self.factor
        return decode_s + self.chunk_s(tokens, past_tokens, batch) if tokens else decode_s
