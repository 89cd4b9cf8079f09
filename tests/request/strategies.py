"""Nodes at random, from integers, so that what a property fails on can be read."""

from hypothesis import strategies as st

from mesh.compute.times import Times
from mesh.domain.ids import InstanceId
from mesh.domain.profile import Grid
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.swapping import SWAPPING, WHOLE, Swap, Swapping
from mesh.policy.rules.turns import TurnRule
from tests.request.schedules import Instance, Node, Request, a_prompt
from tests.support.profiles import profile

MS = 0.001


@st.composite
def grids(draw: st.DrawFn, rows: tuple[int, ...], columns: tuple[int, ...], first_ms: int) -> Grid:
    """Times that grow along both sizes, by up to as much as the first from point to point."""
    seconds: list[list[float]] = []
    for row in range(len(rows)):
        seconds.append([])
        for column in range(len(columns)):
            least = max(
                first_ms * MS if not row and not column else 0.0,
                seconds[row - 1][column] if row else 0.0,
                seconds[row][column - 1] if column else 0.0,
            )
            grown = draw(st.integers(0, 4)) * first_ms * MS / 4 if row or column else 0.0
            seconds[row].append(least + grown)
    return Grid(rows=rows, columns=columns, seconds=tuple(tuple(row) for row in seconds))


@st.composite
def instances(draw: st.DrawFn, name: str, shares: int) -> Instance:
    """With decodes that take about 1/`shares` of the TPOT SLO and less."""
    tpot_ms = draw(st.sampled_from([20, 50, 100, 200, 500]))
    decode_ms = max(tpot_ms * draw(st.integers(2, 60)) // (100 * shares), 1)
    decode = draw(grids((1, 4, 16), (0, 256), decode_ms))
    prefill = draw(grids((1, 64, 256), (0, 512), draw(st.integers(1, decode_ms * 2))))
    running = [
        Request(due_s=due * MS, past=draw(st.integers(1, 300)))
        for due in draw(st.lists(st.integers(-20, 4 * tpot_ms), max_size=8))
    ]
    waiting = [
        a_prompt(left, due * MS)
        for due, left in draw(
            st.lists(st.tuples(st.integers(-20, 3000), st.integers(1, 600)), max_size=2)
        )
    ]
    return Instance(
        name=name,
        times=Times(profile(decode=decode, prefill=prefill)),
        tpot_s=tpot_ms * MS,
        requests=running + waiting,
        passed=draw(st.integers(0, 9)),
    )


@st.composite
def nodes(draw: st.DrawFn, rules: tuple[TurnRule, ...] = (HEADROOM,)) -> Node:
    count = draw(st.integers(1, 4))
    node = Node(
        instances=[draw(instances(f"i{n}", count)) for n in range(count)],
        newcomer=a_prompt(due_s=draw(st.integers(5, 3000)) * MS, left=draw(st.integers(1, 600))),
        target=draw(st.integers(0, count - 1)),
        margin_s=draw(st.sampled_from([0, 5])) * MS,
        may_be_late=draw(st.booleans()) and draw(st.booleans()),
        turn_s_max=draw(st.sampled_from([0, 0, 20, 50, 200])) * MS,
        rule=draw(st.sampled_from(rules)),
    )
    if draw(st.booleans()):
        # Several paces on an instance, none quicker than that by which it was made.
        paces = st.sampled_from([1.0, 1.0, 1.5, 3.0, 10.0])
        for instance in node.instances:
            for request in instance.requests:
                request.tpot_s = instance.tpot_s * draw(paces)
        node.newcomer.tpot_s = node.instances[node.target].tpot_s * draw(paces)
    if draw(st.booleans()):
        node.started_s = -draw(st.integers(0, 40)) * MS
        node.joining = [
            (index, a_prompt(left, due * MS))
            for index, due, left in draw(
                st.lists(
                    st.tuples(
                        st.integers(0, count - 1), st.integers(100, 3000), st.integers(1, 600)
                    ),
                    max_size=2,
                )
            )
        ]
    if draw(st.booleans()) and draw(st.booleans()):
        node.slowdown = draw(st.sampled_from([1.5, 2.0]))
        node.slow_until_s = draw(st.integers(0, 300) | st.integers(300, 2000)) * MS
    if not node.instances[node.target].requests and draw(st.booleans()):
        node.joins_s = draw(st.integers(0, 300) | st.integers(300, 2000)) * MS
        node.newcomer.due_s += node.joins_s
    return node


@st.composite
def swapping_nodes(draw: st.DrawFn) -> Node:
    """Nodes whose weights do not all fit on the device, as far as these go; some are on their way.
    Deadlines leave time for copies.
    """
    node = draw(nodes((SWAPPING, WHOLE)))
    assert isinstance(node.rule, Swapping)
    for each in node.instances:
        each.weights = SWAPPING.parts * draw(st.integers(1, 2))
        for request in each.requests:
            request.due_s += draw(st.integers(0, 2000)) * MS
    node.room = SWAPPING.parts * draw(st.integers(2, 5))
    node.copy_s, node.away_s = (draw(st.integers(*most)) * MS for most in ((1, 300), (0, 10)))
    node.copy_s /= SWAPPING.parts
    left = node.room
    for each in node.instances:
        parts = draw(st.integers(0, node.rule.parts)) if each.weights <= left else 0
        each.share = parts / node.rule.parts
        left -= round(each.weights * each.share)
    moved = draw(st.sampled_from(node.instances))
    share = draw(st.integers(0, node.rule.parts)) / node.rule.parts
    may_move = round(moved.weights * (share - moved.share)) <= left and share != moved.share
    if may_move and draw(st.booleans()):
        node.moving = Swap(InstanceId(moved.name), share)
        node.moved_s = draw(st.integers(0, 500)) * MS
    node.newcomer.due_s += draw(st.integers(0, 2000)) * MS
    return node
