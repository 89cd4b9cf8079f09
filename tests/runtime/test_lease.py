"""Who leads, by steps of time: the lease without a database."""

from mesh.runtime.lease import LEASE_S, LOOK_S_MAX, RENEW_S, Lease, LeaseRow, Role


def row(until: int, *, epoch: int = 3, given_up: bool = False) -> LeaseRow:
    return LeaseRow(epoch=epoch, holder="a:1", until=str(until), given_up=given_up)


def leader(at_s: float = 0.0, epoch: int = 3) -> Lease:
    lease = Lease()
    assert lease.seen(row(0, given_up=True), at_s)
    lease.taken(epoch, at_s)
    return lease


def test_a_lease_that_is_renewed_is_never_taken() -> None:
    lease = Lease()
    for beat in range(100):
        assert not lease.seen(row(beat), beat * RENEW_S)
    assert lease.role is Role.STANDING_BY


def test_one_that_nobody_renews_is_taken_when_it_has_lasted_and_not_before() -> None:
    lease, beats = Lease(), int(LEASE_S / RENEW_S)
    looks = [lease.seen(row(7), 5.0 + beat * RENEW_S) for beat in range(beats + 1)]
    assert looks == [False] * beats + [True]
    assert lease.role is Role.TAKING


def test_one_that_was_given_up_is_taken_at_once() -> None:
    assert Lease().seen(row(7, given_up=True), 5.0)


def test_a_time_without_looks_says_nothing() -> None:
    """The database was away, and the leader could not renew either."""
    lease = Lease()
    assert not lease.seen(row(7), 0.0)
    back_s = 30.0
    assert not lease.seen(row(7), back_s)
    assert not lease.seen(row(8), back_s + RENEW_S), "the leader was faster"
    late_s = back_s + RENEW_S + LOOK_S_MAX + 0.01
    assert not lease.seen(row(8), late_s)
    assert not lease.seen(row(8), late_s + LEASE_S / 2)
    assert lease.seen(row(8), late_s + LEASE_S + 0.01)


def test_the_end_of_the_leaders_session_is_a_sign_for_its_epoch_alone() -> None:
    lease = Lease()
    assert not lease.session_ended(3), "it has not looked yet"
    lease.seen(row(7), 0.0)
    assert not lease.session_ended(2)
    assert lease.session_ended(3)
    assert lease.seen(row(8), 0.1), "it was renewed just before"
    assert lease.row == row(8)
    lease.not_taken(0.1)
    assert lease.role is Role.STANDING_BY
    assert not lease.seen(row(9, epoch=4), 0.2)
    assert not lease.session_ended(3), "another one was faster"
    assert lease.session_ended(4)
    assert not lease.seen(row(9, epoch=5), 0.3), "another one was faster still"
    assert lease.role is Role.STANDING_BY
    assert lease.session_ended(5)
    other = LeaseRow(epoch=5, holder="b:1", until="9")
    assert not lease.seen(other, 0.4), "another one has the same epoch, after a restore"


def test_after_a_try_in_vain_it_waits_again() -> None:
    lease = Lease()
    assert lease.seen(row(7, given_up=True), 0.0)
    lease.not_taken(0.1)
    assert not lease.seen(row(9, epoch=4), 0.2)
    assert not lease.seen(row(9, epoch=4), 0.2 + LEASE_S / 2)


def test_a_leader_that_cannot_renew_serves_on_and_writes_nothing() -> None:
    lease = leader(at_s=10.0)
    assert lease.may_write(10.0 + LEASE_S / 2)
    assert not lease.may_write(10.0 + LEASE_S)
    assert lease.role is Role.LEADING
    lease.renewed(40.0)
    assert lease.may_write(40.0 + LEASE_S / 2)


def test_a_higher_epoch_deposes_one_that_cannot_renew_and_nothing_else_does() -> None:
    lease = leader(epoch=3)
    assert not lease.shown(4, 0.1), "its next renewal tells"
    assert lease.may_write(0.1)
    assert not lease.shown(2, LEASE_S)
    assert not lease.shown(3, LEASE_S)
    assert (lease.role, lease.epoch) == (Role.LEADING, 3)
    assert lease.shown(4, LEASE_S)
    assert (lease.role, lease.may_write(0.1)) == (Role.DEPOSED, False)
    assert not lease.shown(5, LEASE_S), "it is told once"
    assert not lease.seen(row(9, epoch=5, given_up=True), 9.0), "it leads never again"


def test_one_that_stepped_down_leads_never_again() -> None:
    lease = leader()
    lease.step_down()
    assert not lease.may_write(0.1)
    assert not lease.seen(row(9, given_up=True), 1.0)
    assert not lease.session_ended(3)
