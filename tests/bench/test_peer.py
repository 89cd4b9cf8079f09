"""A peer answers from its own process, keeps its words to itself, and says why when it breaks."""

import os
from collections.abc import Callable

import pytest

from bench.peer import Peer
from mesh.domain.errors import Unavailable


def doubling(word: str) -> Callable[[int], tuple[str, int, int]]:
    os.write(1, b"a library says something\n")

    def answer(number: int) -> tuple[str, int, int]:
        if number < 0:
            raise ValueError("below zero")
        return word + os.environ["MORE"], 2 * number, os.getpid()

    return answer


def leaving() -> Callable[[object], object]:
    return lambda _: os._exit(3)


def test_a_peer_answers_from_its_own_process_and_environment(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Peer("doubling", doubling, "a", environment={"MORE": "b"}) as peer:
        peer.wait_ready()
        word, number, pid = peer.ask(21)
        assert (word, number) == ("ab", 42)
        assert pid != os.getpid()
        assert peer.cpu_s() > 0
    assert not capfd.readouterr().out
    assert "MORE" not in os.environ


def test_a_peer_that_fails_or_ends_is_told_with_the_end_of_its_log() -> None:
    with Peer("doubling", doubling, "a", environment={"MORE": ""}) as peer:
        peer.wait_ready()
        with pytest.raises(Unavailable, match=r"doubling: ValueError: below zero\n(.*\n)*.* raise"):
            peer.ask(-1)
        peer._process.join()
        with pytest.raises(Unavailable, match="doubling ended before it was done"):
            peer.ask(1)
    with Peer("leaving", leaving) as peer:
        peer.wait_ready()
        with pytest.raises(Unavailable, match="leaving ended before it was done"):
            peer.ask()
