"""Steps that several ranks make together are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.app.training.rank_steps import RankBatches, RankSteps, needs_shards, parts_of_batch
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.errors import StateError
from p2p_diloco.island.inner_state import InnerState
from p2p_diloco.island.parameters import trained
from p2p_diloco.island.ranks import Ranks
from tests.swarm.island_rank import STEPS_SHAPE, DrawnBatches, text_model, train_steps
from tests.swarm.rank_processes import rank_processes

CASES = {
    "copies": {"kind": "decoder", "has_shards": False, "batch": 5, "windows_at_once": 2},
    "shards": {"kind": "decoder", "has_shards": True, "batch": 4, "windows_at_once": 1},
    "unused": {"kind": "half used", "has_shards": False, "batch": 4, "windows_at_once": 4},
    "recomputed copies": {"kind": "decoder", "has_shards": False, "batch": 4, "windows_at_once": 1},
    "recomputed shards": {"kind": "decoder", "has_shards": True, "batch": 4, "windows_at_once": 1},
    "no memory": {"kind": "hungry", "has_shards": False, "batch": 4, "windows_at_once": 2},
    "no memory for a window": {"kind": "hungry", "has_shards": False, "batch": 4, "windows_at_once": 1},
    "recomputed, no memory": {"kind": "hungry", "has_shards": False, "batch": 4, "windows_at_once": 1},
    "unequal shards": {"kind": "decoder", "has_shards": True, "batch": 5, "windows_at_once": 1},
    "too few": {"kind": "decoder", "has_shards": False, "batch": 1, "windows_at_once": 1},
}


@pytest.mark.parametrize(("windows", "count", "parts"), [(4, 2, [2, 2]), (5, 2, [2, 3]), (8, 3, [2, 3, 3])])
def test_a_batch_is_shared_out_evenly(windows: int, count: int, parts: list[int]) -> None:
    assert parts_of_batch(windows, count) == parts


def test_a_processor_needs_no_shards() -> None:
    assert not needs_shards(10**12, torch.device("cpu"))


@pytest.mark.slow
def test_steps_of_two_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    """The ranks start from different values, of which those of rank 0 count."""
    cases = [
        {"name": name, "recompute": "always" if name.startswith("recomputed") else "auto", **case}
        for name, case in CASES.items()
    ]
    with rank_processes(tmp_path / "island", 2, "steps", cases=cases) as island:
        said = island.said()
    assert said[0]["too few"]["error"].startswith("a step of this run has 1 windows, too few for the 2 ranks of this")
    unequal = said[0]["unequal shards"]["error"]
    assert unequal.endswith("start with --ranks 1, or with copies of the model: --shards never")
    trouble = "out of memory on cpu with"
    for one in said:
        assert (
            one["no memory"]["error"]
            == f"{trouble} 2 windows at a time; start all ranks again with --windows-at-once 1"
        )
        again = one["no memory for a window"]["error"]
        assert again == f"{trouble} 1 window at a time; start all ranks again with --recompute always"
        assert one["recomputed, no memory"]["error"] == (
            f"{trouble} 1 window at a time; start more ranks with --shards always, or join a run with a smaller model "
            "or context"
        )
    for name in ("copies", "shards", "unused", "recomputed copies", "recomputed shards"):
        case = CASES[name]
        model = text_model(str(case["kind"]), seed=0)
        alone = InnerLoop(model, DrawnBatches(int(case["batch"]), STEPS_SHAPE), InnerRule(warmup_steps=1))
        made = train_steps(alone, alone.stream.batch)
        for one in said:
            assert one[name]["recomputes"] == name.startswith("recomputed")
            assert one[name]["losses"] == pytest.approx(made["losses"], rel=1e-5)
            assert one[name]["norms"] == pytest.approx(made["norms"], rel=1e-4)
            assert (
                one[name]["tokens"]
                == made["tokens"]
                == [int(case["batch"]) * STEPS_SHAPE.context] * len(made["tokens"])
            )
        ended = torch.load(tmp_path / "island" / f"{name}.pt", weights_only=True)
        own = trained(model.module)
        assert ended.keys() == own.keys()
        for key, tensor in own.items():
            torch.testing.assert_close(ended[key], tensor.detach(), rtol=1e-3, atol=2e-4)
        whole = sum(tensor.numel() for tensor in own.values())
        held = [one[name]["held"] for one in said]
        assert sum(held) == whole if case["has_shards"] else held == [whole] * 2


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["never", "always"])
def test_all_ranks_change_the_batch_before_the_same_step_and_stay_equal(tmp_path: Path, shards: str) -> None:
    with rank_processes(tmp_path / "island", 2, "turns", shards=shards, steps=14) as island:
        first, second = island.said()
    assert first["windows"] == second["windows"]
    assert first["windows"][:14] == [1, 1, 1, 2, 2, 2, 1, 1, 1, 2, 2, 2, 1, 1]
    assert first["digest"] == second["digest"]


LAYOUTS = {"alone": None, "copies": False, "shards": True}


def loop_of(layout: str) -> InnerLoop:
    """Return a loop of this process alone, or of the only rank of an island."""
    has_shards, model, source = LAYOUTS[layout], text_model("decoder", seed=0), DrawnBatches(4, STEPS_SHAPE)
    if has_shards is None:
        return InnerLoop(model, source, InnerRule())
    ranks = Ranks()
    stream = RankBatches(ranks, source, batch=4, context=STEPS_SHAPE.context)
    return InnerLoop(model, stream, InnerRule(), ranks=RankSteps(ranks, has_shards=has_shards, uses_all=True))


@pytest.mark.parametrize(
    ("saved", "loaded", "fits"),
    [
        ("shards", "shards", True),
        ("copies", "alone", True),
        ("shards", "copies", False),
        ("shards", "alone", False),
        ("copies", "shards", False),
    ],
)
def test_the_state_of_optimisers_with_another_layout_is_reset(
    tmp_path: Path, saved: str, loaded: str, fits: bool
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before, after = loop_of(saved), loop_of(loaded)
        before.step()
        InnerState(tmp_path, {"the optimiser": before}).save("noon")
        kept = InnerState(tmp_path, {"the optimiser": after})
        if fits:
            assert kept.load() == "noon"
            assert after.learning_rate == before.learning_rate
        else:
            with pytest.raises(
                StateError, match=r"does not match, so these are reset: the optimiser \(.*layout|shards"
            ):
                kept.load()
        assert after.step().applied
    finally:
        dist.destroy_process_group()
