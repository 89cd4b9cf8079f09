"""What is booked follows what was seen: up at once, down when it was seen often enough."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.memory.footprints import MARGIN_SHARE, SEEN_MIN, Seen, booked_bytes

MIB = 2**20
STATED = 260 * MIB

LIVES = st.lists(st.tuples(st.integers(-MIB, 1 << 40), st.booleans()), max_size=12)


def seen_of(*lives: tuple[int, bool]) -> Seen:
    seen = Seen()
    for held_bytes, whole in lives:
        seen = seen.after(held_bytes, whole=whole)
    return seen


def test_what_is_stated_is_booked_until_enough_whole_lives_were_seen() -> None:
    assert booked_bytes(STATED, None) == STATED
    for count in range(SEEN_MIN):
        assert booked_bytes(STATED, seen_of(*[(190 * MIB, True)] * count)) == STATED
    booked = booked_bytes(STATED, seen_of(*[(190 * MIB, True)] * SEEN_MIN))
    assert 190 * MIB < booked <= 190 * MIB * (1 + MARGIN_SHARE) + 1


def test_lives_that_computed_hardly_anything_lower_nothing() -> None:
    assert booked_bytes(STATED, seen_of(*[(130 * MIB, False)] * 100)) == STATED


def test_one_life_is_enough_to_book_more() -> None:
    for whole in (False, True):
        assert booked_bytes(STATED, seen_of((300 * MIB, whole))) > 300 * MIB


@given(LIVES, st.integers(0, 1 << 40))
def test_no_less_is_booked_than_was_held(lives: list[tuple[int, bool]], stated: int) -> None:
    booked = booked_bytes(stated, seen_of(*lives))
    assert booked >= max((held for held, _ in lives), default=0)
    if sum(whole for _, whole in lives) < SEEN_MIN:
        assert booked >= stated


@given(LIVES, LIVES)
def test_more_lives_never_lower_what_was_seen_to_be_held(
    lives: list[tuple[int, bool]], more: list[tuple[int, bool]]
) -> None:
    before, after = seen_of(*lives), seen_of(*lives, *more)
    assert after.most_bytes >= before.most_bytes
    if before.lives >= SEEN_MIN:
        assert booked_bytes(STATED, after) >= booked_bytes(STATED, before)
