"""Stop strings over any split of the text."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.text.stops import StopMatcher

PIECES = st.lists(st.text("ab", max_size=6), max_size=6)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The output ends where the first stop string to be complete begins."""
    for end in range(1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: min(found)], True
    return text, False


@given(PIECES, STOPS)
def test_the_output_ends_before_the_stop_string_however_the_text_comes(
    pieces: list[str], stops: list[str]
) -> None:
    matcher, out = StopMatcher(stops), ""
    for piece in pieces:
        out += matcher.push(piece)
        if matcher.stopped:
            break
    else:
        out += matcher.flush()
    whole, stopped = expected("".join(pieces), stops)
    assert (out, matcher.stopped) == (whole, stopped)


@given(PIECES, STOPS)
def test_nothing_given_out_is_ever_taken_back(pieces: list[str], stops: list[str]) -> None:
    matcher, out = StopMatcher(stops), ""
    whole, _ = expected("".join(pieces), stops)
    for piece in pieces:
        out += matcher.push(piece)
        assert whole.startswith(out)
        if matcher.stopped:
            return


def test_without_stop_strings_text_passes_through() -> None:
    matcher = StopMatcher(())
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""
