"""A signed message has no effect when another peer sends it again."""

from __future__ import annotations

from p2p_diloco.protocol.wire.member import Declaration
from p2p_diloco.protocol.wire.messages import decode_message
from p2p_diloco.transport.link import Lane
from simulator.hostility import Caller
from simulator.network import OUTBOUND_ONLY
from simulator.run import key_named, run_rules
from simulator.simulation import Simulation

HONEST = ("p0", "p1", "p2")
GONE = {"killed", "left"}
REPLAYED_CYCLES = 8


async def test_a_replayed_application_does_not_list_a_peer_that_has_gone() -> None:
    """One peer was killed as soon as it was listed, one declared its leaving; their messages are still recent."""
    rules = run_rules(num_spans=(1, 1), heartbeat_seconds=2.0)
    async with Simulation(seed=1, rules=rules, as_bytes=False) as swarm:
        words: dict[str, tuple[bytes, Declaration]] = {}

        def note(sender: bytes, to: bytes, lane: Lane, frame: bytes) -> None:
            word = decode_message(frame)
            if isinstance(word, Declaration) and not word.leaving:
                name = swarm.by_peer[word.peer].name if word.peer in swarm.by_peer else ""
                words[name] = (frame, word)

        for name in HONEST:
            swarm.add(name, founds=name == "p0")
        await swarm.until(lambda: swarm.all_members() and swarm.agreed(), within=120.0)
        await swarm.run(4 * rules.cycle_seconds)
        swarm.network.tap = note
        for name in sorted(GONE):
            swarm.add(name, place=OUTBOUND_ONLY)
        await swarm.until(lambda: swarm.members("p0") >= GONE, within=80.0, step=0.05)
        swarm.network.tap = None
        await swarm.run(0.5)
        swarm.kill("killed")
        swarm.leave("left")
        await swarm.run(5.0)
        swarm.kill("left")
        async with Caller(swarm, "stranger") as stranger:
            await stranger.dial(*swarm.running())
            begin, gone_at = swarm.now, dict.fromkeys(GONE, 0.0)
            while swarm.now < begin + REPLAYED_CYCLES * rules.cycle_seconds:
                for name in sorted(GONE):
                    frame, _ = words[name]
                    for machine in swarm.running():
                        stranger.send(machine.peer, frame, Lane.CONTROL)
                        member = swarm.machines["p2"].transport
                        assert member is not None
                        deadline = swarm.loop.true_seconds() + 1.0
                        member.post_unchanged(machine.peer, frame, lane=Lane.CONTROL, deadline=deadline)
                    is_listed = any(name in swarm.members(each) for each in HONEST)
                    assert not (gone_at[name] and is_listed), f"{name} is back"
                    if not is_listed and not gone_at[name]:
                        gone_at[name] = swarm.now - begin
                await swarm.run(0.5)
        assert all(gone_at.values())
        assert max(gone_at.values()) <= 4 * rules.cycle_seconds
        assert all(key_named(name).peer not in swarm.machines["p0"].roster.peers() for name in GONE)
