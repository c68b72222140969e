"""What the lab has found in `protocol/`, each as a small story; found by seeds, told by hand."""

from __future__ import annotations

from p2p_diloco.lab.swarm import Swarm, swarm_of

CYCLE_SECONDS = 8.0


def one_fragment(num_peers: int) -> Swarm:
    swarm = swarm_of(num_spans=(2,), seed=1)
    swarm.add("boot", trains=False, found=True)
    for place in range(num_peers):
        swarm.add(f"p{place}")
    swarm.run_until(swarm.agreed, 60.0)
    return swarm


def test_a_newcomer_is_not_voted_out_before_it_could_take_part() -> None:
    """The lead that certified it late in a round found in the next one that it had sat out: on and off for ever."""
    swarm = one_fragment(3)
    swarm.run_until(swarm.all_members, 60.0)
    for _ in range(40):
        swarm.run(2.0)
        assert swarm.all_members()


def test_who_joins_a_run_of_one_fragment_becomes_ready_while_it_goes_on() -> None:
    """Its boundary was always a round behind, so it was never compared where both sides stood."""
    swarm = one_fragment(2)
    swarm.run(20.0)
    swarm.add("late")
    swarm.run_until(lambda: swarm.machines["late"].running.ready, 2 * CYCLE_SECONDS)
    swarm.run_until(swarm.all_members, 3 * CYCLE_SECONDS)
