"""An island that keeps θ on its device computes the same bits as one on the host, and copies only codes to the host.

Both islands run on this machine's processor and differ only in the code path; rounding on a GPU is tested elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import HandDrivenIsland, entry_payload, small_corpus, small_plan, start_states, update_of

from p2p_diloco.codec.vectors import numpy_alone
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.ids import SpanId
from p2p_diloco.island import local_spans
from p2p_diloco.island.local_spans import DeviceSpans, LocalSpans, describe_device, encodes_alike, spans_for
from p2p_diloco.outer.state import MAX_IN_FLIGHT, MOST_LEFT, PATIENT_FOR, InFlight, SpanState
from p2p_diloco.protocol.round.round import FragmentContribution

PLAN = small_plan()
WHOLE, PARTED = SpanId(0, 0), SpanId(1, 3)
"""A span of whole blocks, and the last span of its fragment, which ends within a block."""


class Pair:
    """The same island twice: one on the host, one that keeps θ on its device."""

    def __init__(self, folder: Path, plan: RunPlan = PLAN) -> None:
        self.plan = plan
        corpus = small_corpus(folder)
        self.both = [HandDrivenIsland(plan, corpus, kind=kind) for kind in (LocalSpans, DeviceSpans)]
        for island in self.both:
            island.hold(start_states(plan))
            assert island.state.begin()

    def step(self) -> None:
        for island in self.both:
            island.step()

    def contribute(self, round_index: int, fragment: int) -> FragmentContribution:
        first, second = (island.state.contribute(round_index, fragment) for island in self.both)
        assert first is not None
        assert second is not None
        for one, other in zip(first.spans, second.spans, strict=True):
            assert (one.span, one.parent, bytes(one.payload)) == (other.span, other.parent, bytes(other.payload))
            assert one.norm == pytest.approx(other.norm, rel=1e-5)
        return second

    def absorb(self, span: SpanId, round_index: int, **said: Any) -> None:
        place = self.plan.places[span]
        payload = entry_payload(self.plan, np.linspace(-0.01, 0.02, place.stop - place.start))
        for island in self.both:
            island.state.apply(update_of(span, round_index, payload, **said))
            island.settle()

    def are_alike(self) -> bool:
        host, there = self.both
        pairs = zip(host.parameters.read_all(), there.parameters.read_all(), strict=True)
        same = all(one.tobytes() == other.tobytes() for one, other in pairs)
        heads = [[state.head for _, state in sorted(island.state.states().items())] for island in self.both]
        return same and heads[0] == heads[1]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_both_kinds_of_span_exist() -> None:
    lengths = {span: place.stop - place.start for span, place in PLAN.places.items()}
    assert lengths[WHOLE] % 64 == 0
    assert lengths[PARTED] % 64 != 0


@pytest.mark.parametrize("span", [WHOLE, PARTED], ids=["whole blocks", "a part of one"])
@pytest.mark.parametrize("own_included", [True, False])
def test_a_round_gives_the_same_bits(pair: Pair, span: SpanId, own_included: bool) -> None:
    pair.step()
    pair.contribute(span.fragment, span.fragment)
    pair.step()
    pair.absorb(span, span.fragment, own_included=own_included)
    pair.step()
    assert pair.are_alike()
    pair.contribute(span.fragment + 2, span.fragment)
    assert pair.are_alike()


def test_a_contribution_that_is_too_long_is_shortened_on_the_device(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most contributions of an island that is faster than the others are too long."""
    host, there = pair.both
    limit = PLAN.rules.contribution_limit * 1e-6
    pair.step()
    pair.absorb(WHOLE, 0, radius=1e-6)
    pair.step()
    monkeypatch.setattr(there.parameters, "view", None)
    sent = [island.state.contribute(2, 0, frozenset({WHOLE})) for island in (host, there)]
    codec, elements = PLAN.codecs.contribution, PLAN.places[WHOLE].stop - PLAN.places[WHOLE].start
    vectors = []
    for contribution in sent:
        assert contribution is not None
        (one,) = contribution.spans
        assert one.norm > 1000 * limit
        assert codec.squared_norm(one.payload, elements) ** 0.5 <= limit
        vectors.append(codec.decode(one.payload, elements))
    assert np.linalg.norm(vectors[0] - vectors[1]) < 0.05 * limit
    assert np.linalg.norm(vectors[1]) > 0.95 * limit


def test_an_island_on_a_device_gives_up_what_cannot_be_sent_too(pair: Pair) -> None:
    limit = PLAN.rules.contribution_limit * 1e-6
    for round_index in range(0, 2 * PATIENT_FOR + 6, 2):
        pair.step()
        sent = [island.state.contribute(round_index, 0, frozenset({WHOLE})) for island in pair.both]
        if round_index < 2 * PATIENT_FOR + 4:
            pair.absorb(WHOLE, round_index, radius=1e-6)
    assert None not in sent
    for island in pair.both:
        assert np.linalg.norm(island.residual(WHOLE)) == pytest.approx(MOST_LEFT * limit, rel=0.1)


def test_an_encoding_too_long_for_reducers_is_shortened_although_its_vector_is_not(pair: Pair) -> None:
    _, there = pair.both
    pair.step()
    codec, state = PLAN.codecs.contribution, there.state.states()[WHOLE]
    first = there.state.local.contribute(WHOLE, state, InFlight(), 2)
    limit = 0.999 * codec.squared_norm(first.payload, state.elements) ** 0.5
    strict = replace(state, head=replace(state.head, radius=limit / PLAN.rules.contribution_limit))
    again = there.state.local.contribute(WHOLE, strict, InFlight(), 2)
    assert codec.squared_norm(again.payload, state.elements) ** 0.5 <= limit
    assert again.norm == first.norm


def test_contributions_in_flight_give_the_same_bits(pair: Pair) -> None:
    for round_index in range(0, 2 * MAX_IN_FLIGHT + 4, 2):
        pair.step()
        pair.contribute(round_index, 0)
    assert pair.are_alike()
    pair.absorb(WHOLE, round_index)
    assert pair.are_alike()


def test_a_replaced_span_gives_the_same_bits(pair: Pair) -> None:
    pair.step()
    pair.contribute(0, 0)
    for island in pair.both:
        for span in (PARTED, WHOLE):
            island.hold({span: start_states(PLAN)[span]})
    assert pair.are_alike()


def test_another_codec_gives_the_same_bits(tmp_path: Path) -> None:
    pair = Pair(tmp_path, small_plan({"codec.contribution": "int8"}))
    pair.step()
    pair.contribute(0, 0)
    pair.absorb(WHOLE, 0)
    assert pair.are_alike()


def test_a_diverged_island_contributes_nothing_from_its_device_either(pair: Pair) -> None:
    pair.step()
    for island in pair.both:
        island.parameters.write(0, 0, 1, np.array([np.nan], np.float32))
    sent = pair.contribute(0, 0)
    assert WHOLE not in {one.span for one in sent.spans}


def test_an_ordinary_round_copies_only_codes_to_the_host(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """θ stays: no NumPy array on the host shares its memory or has its length."""
    _, there = pair.both
    pair.step()
    whole = {span for span, place in PLAN.places.items() if (place.stop - place.start) % 64 == 0 and span.fragment == 0}
    theta = {parameter.untyped_storage().data_ptr() for parameter in there.loop.model.parameters()}
    came: list[int] = []
    as_array = torch.Tensor.numpy

    def numpy(tensor: torch.Tensor, **more: Any) -> Any:
        assert tensor.untyped_storage().data_ptr() not in theta, "θ itself went over the bus"
        if tensor.dtype == torch.uint8:
            came.append(tensor.numel())
        return as_array(tensor, **more)

    def refuse(*_: object) -> None:
        raise AssertionError("a span of θ went over the bus")

    monkeypatch.setattr(torch.Tensor, "numpy", numpy)
    for way in ("read", "view", "write"):
        monkeypatch.setattr(there.parameters, way, refuse)
    sent = there.state.contribute(0, 0, frozenset(whole))
    elements = sum(PLAN.places[span].stop - PLAN.places[span].start for span in whole)
    assert sent is not None
    assert {one.span for one in sent.spans} == whole
    assert sum(came) == elements // 64 * 40, "scales, two sums and codes"
    place = PLAN.places[WHOLE]
    there.state.apply(update_of(WHOLE, 0, entry_payload(PLAN, np.full(place.stop - place.start, 0.01, np.float32))))
    there.hold({PARTED: start_states(PLAN)[PARTED]})
    assert there.state.states()[WHOLE].head.round == 0
    assert sum(came) == elements // 64 * 40, "following copies nothing"


def test_a_negative_zero_stays_negative(pair: Pair) -> None:
    """Adding zero to it would make it positive."""
    place = PLAN.places[PARTED]
    below_N, above_N = (np.full(place.stop - place.start, zero, np.float32) for zero in (-0.0, 0.0))
    for island in pair.both:
        head = start_states(PLAN)[PARTED].head
        island.hold({PARTED: SpanState(head=head, anchor_N=above_N, momentum_N=above_N)})
        island.parameters.write(PARTED.fragment, place.start, place.stop, below_N)
        island.hold({PARTED: SpanState(head=head, anchor_N=below_N, momentum_N=above_N)})
    assert pair.are_alike()
    assert np.signbit(pair.both[1].parameters.read(PARTED.fragment, place.start, place.stop)).all()


def test_it_follows_entries_without_compiled_loops(pair: Pair) -> None:
    with numpy_alone():
        pair.step()
        pair.contribute(0, 0)
        pair.absorb(WHOLE, 0)
    assert pair.are_alike()


def test_theta_stays_only_on_a_device_that_encodes_like_the_host(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(where: str) -> type[LocalSpans]:
        return type(spans_for(PLAN, pair.both[0].parameters, torch.device(where)))

    assert kind("cpu") is LocalSpans
    assert encodes_alike(torch.device("cpu"))
    assert not encodes_alike(torch.device("meta")), "the meta device holds no numbers"
    assert kind("meta") is LocalSpans
    monkeypatch.setattr(local_spans, "encodes_alike", lambda where: True)
    assert kind("meta") is DeviceSpans


@pytest.mark.parametrize(
    ("kind", "where", "said"),
    [
        (LocalSpans, "cpu", "trains on the processor, [0-9]+ threads?"),
        (DeviceSpans, "meta", "trains on meta; contributions are encoded there"),
        (
            LocalSpans,
            "meta",
            "trains on meta; contributions are encoded on the processor, since meta rounds differently",
        ),
    ],
)
def test_the_devices_of_training_and_encoding_are_reported(
    pair: Pair, kind: type[LocalSpans], where: str, said: str
) -> None:
    local = kind(PLAN, pair.both[0].parameters)
    assert re.fullmatch(said, describe_device(torch.device(where), local))
