"""What test_harness starts in processes of their own, which import nothing more for it."""

import os
from collections.abc import Callable


def doubling(word: str) -> Callable[[int], tuple[str, int, int]]:
    os.write(1, b"a library says something\n")

    def answer(number: int) -> tuple[str, int, int]:
        if number < 0:
            raise ValueError("below zero")
        return word + os.environ["MORE"], 2 * number, os.getpid()

    return answer


def leaving() -> Callable[[object], object]:
    return lambda _: os._exit(3)
