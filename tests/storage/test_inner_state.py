"""Optimisers and loop state continue after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.text.data import BatchStream, Corpus, open_corpus
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.config.inner_rule import InnerRule, OptimizerName
from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.island.inner_state import INNER_FILE, InnerState

SHAPE = ModelShape(layers=1, width=16, heads=2, feed_forward=32, context=16)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 400)
    return open_corpus(path, held_out_share=0.05)


def loop_on(corpus: Corpus, optimizer: OptimizerName, position: int = 0) -> InnerLoop:
    stream = BatchStream(corpus, Digest(bytes(32)), PeerId(bytes(32)), batch=2, context=16, position=position)
    return InnerLoop(build_model(SHAPE, 0), stream, InnerRule(optimizer=optimizer, warmup_steps=8))


def numbers(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_loop_continues_bit_for_bit(tmp_path: Path, corpus: Corpus, optimizer: OptimizerName) -> None:
    one = loop_on(corpus, optimizer)
    for _ in range(6):
        one.step()
    InnerState(tmp_path, {"the optimiser": one}).save("noon")
    two, fresh = loop_on(corpus, optimizer, one.stream.position), loop_on(corpus, optimizer, one.stream.position)
    for other in (two, fresh):
        other.model.load_state_dict(one.model.state_dict())
    assert InnerState(tmp_path, {"the optimiser": two}).load() == "noon"
    assert two.learning_rate == one.learning_rate
    for each in (one, two, fresh):
        each.step()
    assert torch.equal(numbers(two.model), numbers(one.model))
    assert not torch.equal(numbers(fresh.model), numbers(one.model)), "a reset optimiser takes another step"


def test_nothing_is_loaded_if_nothing_was_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    assert InnerState(tmp_path, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)}).load() is None
    InnerState(tmp_path, {}).save("noon")
    assert not list(tmp_path.iterdir())


class Counter:
    """A stateful object, such as the position of a data loader."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_matching_state_is_loaded_and_the_rest_is_named(tmp_path: Path) -> None:
    wide, narrow = nn.Linear(4, 1), nn.Linear(3, 1)
    kept = {"counter": Counter(7), "optimizer": torch.optim.AdamW(wide.parameters()), "old": Counter(1)}
    InnerState(tmp_path, kept).save("noon")
    counter = Counter(0)
    others = {
        "counter": counter,
        "optimizer": torch.optim.AdamW(narrow.parameters()),
        "old": torch.optim.SGD(wide.parameters(), 0.1),
        "new": Counter(0),
    }
    with pytest.raises(StateError) as caught:
        InnerState(tmp_path, others).load()
    assert str(caught.value) == (
        f"{tmp_path / INNER_FILE} does not match, so these are reset: optimizer (its tensors had other shapes), "
        f"old (it was a {__name__}.Counter), new (it was not saved)"
    )
    assert counter.value == 7


@pytest.mark.parametrize("noise", [b"", b"nothing that torch wrote"])
def test_an_unreadable_file_is_reported(tmp_path: Path, noise: bytes) -> None:
    (tmp_path / INNER_FILE).write_bytes(noise)
    with pytest.raises(StateError, match=r"inner.pt cannot be read \(.+\); these are reset: counter"):
        InnerState(tmp_path, {"counter": Counter(1)}).load()


def test_state_that_could_not_be_read_back_is_refused_and_the_last_file_stays(tmp_path: Path) -> None:
    InnerState(tmp_path, {"counter": Counter(1)}).save("noon")
    with pytest.raises(StateError, match="cannot save the optimiser and loop state"):
        InnerState(tmp_path, {"counter": Counter(Counter(2))}).save("one")
    again = Counter(0)
    assert InnerState(tmp_path, {"counter": again}).load() == "noon"
    assert again.value == 1
    assert [path.name for path in tmp_path.iterdir()] == [INNER_FILE]


def test_a_failed_write_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot save the optimiser"):
        InnerState(tmp_path / "gone", {"counter": Counter(1)}).save("noon")


def broken_adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimiser whose second moment has overflowed: its parameters would never move again."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    optimizer.step()
    return optimizer


def test_moments_that_are_not_finite_are_not_saved_and_begin_anew(tmp_path: Path) -> None:
    optimizer = broken_adam(nn.Linear(4, 1))
    with pytest.raises(StateError, match="optimizer 0 holds numbers that are not finite and begins anew"):
        InnerState(tmp_path, {"optimizer 0": optimizer}).save("noon")
    assert not any(state["exp_avg_sq"].any() for state in optimizer.state.values())
    assert not list(tmp_path.iterdir())


def test_moments_that_an_earlier_version_saved_broken_are_not_loaded(tmp_path: Path) -> None:
    model, fresh = nn.Linear(4, 1), torch.optim.AdamW(nn.Linear(4, 1).parameters())
    InnerState(tmp_path, {"optimizer 0": fresh}).save("noon")
    path = tmp_path / INNER_FILE
    kept = torch.load(path, weights_only=True)
    kept["parts"]["optimizer 0"]["state"] = broken_adam(model).state_dict()
    torch.save(kept, path)
    with pytest.raises(StateError, match=r"reset: optimizer 0 \(it holds numbers that are not finite\)"):
        InnerState(tmp_path, {"optimizer 0": fresh}).load()
    assert not fresh.state
    loop_state = Counter(float("inf"))
    InnerState(tmp_path, {"best": loop_state}).save("noon")
    assert InnerState(tmp_path, {"best": Counter(0.0)}).load() == "noon", "a loop's own objects may hold anything"
