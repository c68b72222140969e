"""The run: a model of the size that is meant, a cycle as long as it should be, bytes as they are sent."""

from __future__ import annotations

import pytest

from benchmarks.new_run import order_of_new_run
from benchmarks.training.our_run import BATCH, CONTEXT, RunShape, plan_shape, run_values, sent_bytes
from p2p_diloco.config.manifest import decode_signed_manifest
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.errors import ConfigError
from p2p_diloco.signing import SigningKey


def plan_for(shape: RunShape) -> RunPlan:
    return plan_shape(shape, cycle_seconds=8.0)


def test_a_cycle_is_as_long_as_it_should_be_and_the_model_has_ten_million_parameters() -> None:
    plan = plan_for(RunShape(codec="int4", fragments=4, spans_per_fragment=8))
    assert plan.rules.clock.round_seconds * plan.rules.clock.num_fragments == 8.0
    assert 9.5e6 < plan.num_parameters < 10.5e6
    assert (plan.inner.batch, plan.shape.context) == (BATCH, CONTEXT)
    assert len(plan.places) == 32


@pytest.mark.parametrize(("codec", "bits"), [("int4", 8.5), ("bfloat16", 32.0), ("float32", 64.0)])
def test_of_both_ways_a_peer_keeps_its_own_share(codec: str, bits: float) -> None:
    plan = plan_for(RunShape(codec=codec, fragments=2, spans_per_fragment=4, model="tiny"))
    assert 8 * sent_bytes(plan, 4) / plan.num_parameters == pytest.approx(bits * 3 / 4, rel=0.02)
    assert 8 * sent_bytes(plan, 2) / plan.num_parameters == pytest.approx(bits / 2, rel=0.02)


def test_one_fragment_that_moves_in_every_round_is_never_compared() -> None:
    one = plan_for(RunShape(codec="int4", fragments=1, spans_per_fragment=4, model="tiny"))
    assert one.rules.scrub_cycles > 1_000_000
    several = plan_for(RunShape(codec="int4", fragments=2, spans_per_fragment=4, model="tiny"))
    assert several.rules.scrub_cycles == 8


def test_more_parts_than_tensors_are_refused() -> None:
    with pytest.raises(ConfigError):
        plan_for(RunShape(codec="int4", fragments=500, spans_per_fragment=4, model="tiny"))


def test_what_peers_are_told_is_signed_by_the_key_that_they_are_told() -> None:
    order = order_of_new_run(run_values(RunShape(codec="int4", fragments=2, spans_per_fragment=4, model="tiny"), 4.0))
    signed = decode_signed_manifest(bytes.fromhex(order["manifest"]))
    assert signed.verify(signed.manifest.digest()).manifest == signed.manifest
    organiser = SigningKey(bytes.fromhex(order["organiser"]))
    assert signed.manifest.sign(organiser) == signed
