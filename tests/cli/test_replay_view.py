"""The picture of a replay that runs."""

from mesh.cli.replay_view import LINES_BESIDE, ReplayView
from tests.evaluation.replay.made import PLAN, RESULTS


def shown(view: ReplayView, height: int = 40) -> list[str]:
    return [line.plain for line in view.picture(height)]


def test_it_says_what_is_due_open_and_ended() -> None:
    view = ReplayView(PLAN)
    for result in RESULTS[:5]:
        view.ended(result)
    view.at(5.5)
    bar, heads, whole, *each = shown(view)
    assert "6 of 10 s, 5 of 9 calls ended" in bar
    assert heads.split()[0] == "DEPLOYMENT"
    # Due 6, open 1, finished 4, refused 1, failed 0, met 2 of 5.
    assert whole.split() == ["all", "6", "1", "4", "1", "0", "40.0", "1.500"]
    assert [line.split()[0] for line in each] == ["chat", "code"]


def test_it_fits_on_the_screen_and_begins_with_nothing() -> None:
    view = ReplayView(PLAN)
    assert len(shown(view, LINES_BESIDE + 2)) == 4
    view.at(-0.5)
    assert "0 of 10 s, 0 of 9 calls ended" in shown(view)[0]
