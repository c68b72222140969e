"""The plan derived from a manifest is equal on all peers."""

from __future__ import annotations

import numpy as np
import pytest
from small_run import small_manifest, small_plan

from p2p_diloco.codec.vectors import BLOCK
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.config.run_plan import SpanPlace, plan_run
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId, SpanId, format_peer_id


def test_two_builds_are_equal() -> None:
    one, other = small_plan(), small_plan()
    assert (one.fragments, one.places, one.rules, one.inner, one.outer, one.merge) == (
        other.fragments, other.places, other.rules, other.inner, other.outer, other.merge
    )  # fmt: skip


def test_every_element_is_in_exactly_one_span() -> None:
    plan = small_plan()
    for fragment in plan.fragments:
        places = [plan.places[span] for span in plan.spans_of(fragment.index)]
        assert [place.start for place in places] == [0, *[place.stop for place in places[:-1]]]
        assert places[-1].stop == fragment.elements
    assert len(plan.places) == sum(plan.rules.num_spans)


def test_spans_are_cut_at_blocks_of_the_codecs() -> None:
    plan = small_plan()
    assert all(place.start % BLOCK == 0 for place in plan.places.values())
    for span, elements in plan.rules.span_elements.items():
        assert plan.rules.payload_bytes[span] == plan.codecs.contribution.encoded_bytes(elements)


def test_means_are_radial_except_in_blocks_of_an_embedding() -> None:
    plan = small_plan()
    assert plan.codecs.radial.keys() == plan.places.keys()
    for span, is_radial_B in plan.codecs.radial.items():
        place = plan.places[span]
        rows = np.zeros(plan.fragments[span.fragment].elements, np.bool_)
        for tensor in plan.fragments[span.fragment].tensors:
            rows[tensor.start : tensor.stop] = tensor.name in ("embedding", "head")
        here = rows[place.start : place.stop]
        assert is_radial_B.tolist() == [not here[start : start + 64].any() for start in range(0, len(here), 64)]
    marks = np.concatenate(list(plan.codecs.radial.values()))
    assert marks.any()
    assert not marks.all()


def test_a_run_may_have_plain_means() -> None:
    assert not small_plan({"outer.mean": "plain"}).codecs.radial


def test_the_number_of_parameters_is_that_of_the_model() -> None:
    plan = small_plan()
    assert plan.num_parameters == plan.shape.num_parameters


def test_changes_of_the_manifest_reach_the_shape() -> None:
    plan = small_plan({"model.width": 32})
    assert (plan.shape.width, plan.shape.layers, plan.shape.context) == (32, 1, 12)


def test_the_windows_of_a_step_are_its_tokens_in_windows_of_the_context() -> None:
    assert small_plan({"inner.step_tokens": 36}).inner.batch == 3
    assert small_plan({"inner.step_tokens": 36, "model.context": 4}).inner.batch == 9


@pytest.mark.parametrize(("tokens", "nearest"), [(1, 12), (11, 12), (25, 24), (31, 36)])
def test_a_step_that_is_no_whole_number_of_windows_is_refused(tokens: int, nearest: int) -> None:
    with pytest.raises(ConfigError) as caught:
        small_plan({"inner.step_tokens": tokens})
    assert str(caught.value) == (
        f"inner.step_tokens is {tokens}, which is no multiple of the context of 12 tokens; the nearest one is {nearest}"
    )


def test_the_tokens_of_a_step_do_not_matter_to_an_own_loop() -> None:
    tensors = (("weight", (8, 8), "radial"),)
    values = {"model": {"tensors": tensors, "context": 48}, "rounds.fragments": 1, "inner.step_tokens": 7}
    assert plan_run(draft_manifest(now_seconds=1.0, values=values)).inner.learning_rate > 0.0


def test_fewer_spans_are_cut_if_there_are_too_few_blocks() -> None:
    plan = small_plan({"rounds.spans_per_fragment": 2048})
    assert all(0 < count < 4096 for count in plan.rules.num_spans)
    assert plan.spans_of(0)[-1] == SpanId(0, plan.rules.num_spans[0] - 1)


def test_the_rules_of_the_protocol_are_those_of_the_manifest() -> None:
    manifest = small_manifest({"membership.group_size": 5, "rounds.retained_cycles": 3})
    rules = plan_run(manifest).rules
    assert rules.run == manifest.digest()
    assert (rules.group_size, rules.retained_cycles) == (5, 3)
    assert rules.clock.start_seconds == manifest.rounds.clock_start
    assert rules.clock.num_fragments == 2


def test_sizes_of_contributions_and_entries_are_those_of_their_codecs() -> None:
    plan = small_plan({"codec.contribution": "float32", "codec.entry": "int4"})
    for span, elements in plan.rules.span_elements.items():
        assert plan.rules.payload_bytes[span] == 4 * elements
        assert plan.rules.entry_bytes[span] == plan.codecs.entry.encoded_bytes(elements)


def test_entries_are_rounded_stochastically_and_row_means_have_eight_bits_whatever_the_other_codecs() -> None:
    codecs = small_plan({"codec.contribution": "float32", "codec.entry": "float32"}).codecs
    assert (codecs.rounds_stochastically, codecs.row_mean.name) == (True, "int8")


@pytest.mark.parametrize(("round_seconds", "expected"), [(8.0, 1.0), (1.0, 1.0), (0.5, 0.5)])
def test_heartbeats_come_every_second_or_every_round_if_rounds_are_shorter(
    round_seconds: float, expected: float
) -> None:
    assert small_plan({"rounds.round_seconds": round_seconds}).rules.heartbeat_seconds == expected


def test_the_merge_rule_is_that_of_the_manifest() -> None:
    plan = small_plan({"outer.merge": "blend", "outer.fragment_update_alpha": 0.25, "outer.learning_rate": 0.7})
    assert (plan.merge.kind, plan.merge.alpha, plan.outer.learning_rate) == ("blend", 0.25, 0.7)


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match="fragments"):
        small_plan({"rounds.fragments": 1000})


def test_a_place_is_a_value() -> None:
    assert SpanPlace(start=0, stop=64) == SpanPlace(start=0, stop=64)


def test_a_listed_run_names_its_members() -> None:
    name = format_peer_id(PeerId(bytes(range(32))))
    rules = plan_run(small_manifest({"trust.mode": "listed", "trust.peers": [name]})).rules
    assert rules.listed == {PeerId(bytes(range(32)))}
    assert plan_run(small_manifest()).rules.listed is None
