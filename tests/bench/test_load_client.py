"""A client's share of a token is what is left when the server's own time is taken away."""

import pytest

from bench.load_client import Heard, Shares, measure


def test_shares_leave_the_server_s_time_out() -> None:
    shares = Shares()
    heard = Heard(due_s=9.99, sent_s=10.0, tokens_s=[10.205, 10.303, 10.401])
    shares.add(heard, 10.002, [10.202, 10.302, 10.402], tokens=4)
    assert shares.ttft_ms == pytest.approx([5.0])
    assert shares.token_ms == pytest.approx([1.0, -1.0])
    assert shares.late_ms == pytest.approx([10.0])
    assert shares.figures()["missing_tokens"] == 1.0


def test_both_clients_hear_every_token_of_the_scripted_server() -> None:
    found = measure(streams=8, tokens=5, token_s=0.05, rounds=1)
    for shares in found.values():
        figures = shares.figures()
        assert figures["missing_tokens"] == 0.0
        assert len(shares.ttft_ms) == 8
        assert len(shares.token_ms) == 32
        assert 0.0 < figures["ttft_share_ms_p50"] < 2000.0
        assert -1.0 < figures["token_share_ms_p50"] < 1000.0
