"""The demo's timeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.cli.demo_plan import FRAGMENTS, DemoOptions, plan_demo
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId


@given(peers=st.integers(3, 64), seconds=st.floats(40, 3600))
def test_planned_events_are_in_order_and_before_the_end(peers: int, seconds: float) -> None:
    plan = plan_demo(DemoOptions(peers=peers, seconds=seconds), now_seconds=1e9)
    assert len(plan.peers) == peers
    assert 0 < plan.late_at < plan.kill_at < plan.bootstrap_kill_at < plan.end_at <= seconds
    assert plan.victim in plan.early
    assert plan.late not in plan.early
    assert len(plan.early) >= 2
    assert plan.clock_start > 1e9


def test_the_last_round_ends_a_cycle() -> None:
    plan = plan_demo(DemoOptions(peers=4, seconds=61.0), now_seconds=0.0)
    assert (plan.last_round + 1) % FRAGMENTS == 0
    assert plan.end_at == plan.num_rounds * plan.round_seconds


@pytest.mark.parametrize("peers", [0, 2, 65])
def test_too_few_or_too_many_peers_are_refused(peers: int) -> None:
    with pytest.raises(ConfigError, match=f"--peers is {peers}; expected 3 to 64: one is killed and one comes late"):
        plan_demo(DemoOptions(peers=peers), now_seconds=0.0)


@pytest.mark.parametrize("seconds", [0.0, 39.0, float("nan"), float("inf")])
def test_too_little_time_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"--seconds is {seconds:g}; expected at least 40"):
        plan_demo(DemoOptions(peers=4, seconds=seconds), now_seconds=0.0)


def test_a_model_too_large_for_a_demo_is_refused() -> None:
    with pytest.raises(ConfigError, match="--model is 'base'; expected tiny or small"):
        plan_demo(DemoOptions(model="base"), now_seconds=0.0)


@pytest.mark.parametrize("model", ["tiny", "small"])
def test_the_run_and_the_lone_islands_run_are_valid_manifests(model: str) -> None:
    plan = plan_demo(DemoOptions(peers=4, model=model, seconds=150.0), now_seconds=1e9)
    organiser = PeerId(bytes(32))
    run = draft_manifest(organiser=organiser, now_seconds=1e9, values=plan.manifest_values())
    lone = draft_manifest(organiser=organiser, now_seconds=1e9, values=plan.lone_values())
    assert run.rounds.clock_start == plan.clock_start
    assert run.rounds.planned_cycles * FRAGMENTS == plan.num_rounds
    assert (lone.outer.momentum, lone.outer.learning_rate, lone.codec.contribution) == (0.0, 1.0, "float32")
    assert run.inner == lone.inner
    assert run.digest() != lone.digest()
