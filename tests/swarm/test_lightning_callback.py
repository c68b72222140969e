"""Lightning in a run, on an in-memory network. Skipped without Lightning: `make examples` brings it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import p2p_diloco
from p2p_diloco.testing import local_swarm

lightning = pytest.importorskip("lightning", reason="needs lightning: make examples brings it")

from p2p_diloco.callbacks.lightning import SwarmCallback, count_tokens  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

UNTIL_ROUND = 24
FIRST_ROUND = 2 / 4000
"""Progress after the entries of the first round: two of four spans, in one of a thousand cycles."""
BATCH = 16


class Adder(lightning.LightningModule):  # type: ignore[misc]
    """Learns to add eight numbers, and notes what happens."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        self.fails = fails
        self.batches: list[torch.Tensor] = []
        self.losses: list[float] = []
        self.trained: list[list[torch.Tensor]] = []
        self.validated: list[list[torch.Tensor]] = []

    def loss(self, numbers: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(numbers), numbers.sum(dim=1, keepdim=True))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("the caller's own error")
        self.batches.append(batch[0])
        self.trained.append(parameters(self))
        loss = self.loss(batch[0])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.validated.append(parameters(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def parameters(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def make_loader(num: int = 1024) -> DataLoader[Any]:
    numbers = torch.rand(num, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(numbers), batch_size=BATCH, shuffle=True)


def fit(folder: Path, callback: Any, module: Adder, validates: bool = False, **words: Any) -> Any:
    choices: dict[str, Any] = {
        "accelerator": "cpu",
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_steps": 1_000_000,
        "max_epochs": -1,
        "log_every_n_steps": 2,
    }
    callbacks = callback if isinstance(callback, list) else [callback]
    trainer = lightning.Trainer(callbacks=callbacks, **{**choices, **words})
    trainer.fit(module, make_loader(), make_loader(BATCH) if validates else None)
    return trainer


def fit_alone(folder: Path, module: Adder, **words: Any) -> tuple[SwarmCallback, Any]:
    with local_swarm() as local:
        callback = SwarmCallback(local.found, tokens=lambda batch: len(batch[0]))
        return callback, fit(folder, callback, module, **words)


def test_two_trainers_learn_together_stop_with_the_run_and_hold_the_same_model(tmp_path: Path) -> None:
    fit_alone(tmp_path, Adder(), max_steps=1)  # imports what Lightning imports late
    ada, ben = Adder(), Adder()
    with local_swarm() as local:
        first = SwarmCallback(local.found, until_round=UNTIL_ROUND)
        second = SwarmCallback(local.join, until_round=UNTIL_ROUND)
        thread = threading.Thread(target=fit, args=(tmp_path / "ada", first, ada))
        thread.start()
        while not ada.losses:
            assert thread.is_alive()
        fit(tmp_path / "ben", second, ben)
        thread.join()
    assert first.swarm.status.state_digest == second.swarm.status.state_digest != ""
    assert second.swarm.status.entries_absorbed > 0
    assert equal(parameters(ada), parameters(ben))
    assert ben.losses[-1] < 0.2 * ada.losses[0]


def test_a_step_counts_the_tokens_of_all_its_batches(tmp_path: Path) -> None:
    callback, trainer = fit_alone(tmp_path, Adder(), max_steps=5, accumulate_grad_batches=3)
    status = callback.swarm.status
    assert (trainer.global_step, status.inner_steps, status.tokens) == (5, 5, 5 * 3 * BATCH)


def test_the_published_loss_is_that_of_the_module(tmp_path: Path) -> None:
    module = Adder()
    callback, _ = fit_alone(tmp_path, module, max_steps=2, accumulate_grad_batches=2)
    assert callback.swarm.status.loss == pytest.approx(module.losses[3])


@pytest.mark.parametrize("shared", [True, False])
def test_validations_and_checkpoints_are_of_the_shared_module_and_steps_of_the_own(
    tmp_path: Path, shared: bool
) -> None:
    anchor: list[torch.Tensor] = []

    class Watch(lightning.Callback):  # type: ignore[misc]
        """Comes after the callback of the swarm."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if callback.swarm.progress < FIRST_ROUND:
                time.sleep(0.03)  # until the entries of the first round are there; the next ones come a minute later

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 100:
                with callback.swarm.anchor():
                    anchor.extend(parameters(module))

    module = Adder()
    checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "kept", every_n_train_steps=100)
    words = {"enable_checkpointing": True, "num_sanity_val_steps": 1}
    words |= {"val_check_interval": 100, "check_val_every_n_epoch": None}
    with local_swarm(rounds={"round_seconds": 60.0}) as local:
        callback = SwarmCallback(local.found, shared=shared)
        fit(tmp_path, [callback, Watch(), checkpoint], module, validates=True, max_steps=101, **words)
    (saved,) = (tmp_path / "kept").glob("*.ckpt")
    own = module.trained[100]
    assert not equal(own, anchor)
    assert equal(module.validated[0], module.trained[0]), "the sanity check comes before the swarm"
    assert equal(module.validated[1], anchor if shared else own)
    kept = torch.load(saved, weights_only=False)["state_dict"]
    assert equal(list(kept.values()), anchor if shared else own)
    assert equal(parameters(module), anchor) is shared, "after training"


def test_a_module_in_bfloat16_is_refused_with_the_arguments_of_lightning(tmp_path: Path) -> None:
    with pytest.raises(p2p_diloco.ConfigError, match='and for speed set precision="bf16-mixed" in the Trainer'):
        fit_alone(tmp_path, Adder(), precision="bf16-true", max_steps=1)


def test_mixed_precision_trains(tmp_path: Path) -> None:
    callback, _ = fit_alone(tmp_path, Adder(), precision="bf16-mixed", max_steps=3)
    assert callback.swarm.status.inner_steps == 3


def test_trainers_with_the_same_seed_draw_different_batches(tmp_path: Path) -> None:
    ada, ben = Adder(), Adder()
    for module in (ada, ben):
        lightning.seed_everything(7)
        fit_alone(tmp_path, module, max_steps=1)
    assert not torch.equal(ada.batches[0], ben.batches[0])


def test_after_an_exception_the_peer_has_left(tmp_path: Path) -> None:
    with local_swarm() as local:
        callback = SwarmCallback(local.found)
        with pytest.raises(RuntimeError, match="own error"):
            fit(tmp_path, callback, Adder(fails=True))
        assert callback.swarm.status.phase == "finished"


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (torch.zeros(4, 8), 32),
        ([torch.zeros(4, 8), torch.zeros(4)], 32),
        ({"labels": torch.zeros(4), "input_ids": torch.zeros(4, 8)}, 32),
        ({"pixels": (torch.zeros(2, 3), None)}, 6),
    ],
)
def test_tokens_are_the_input_ids_or_the_first_tensor(batch: Any, tokens: int) -> None:
    assert count_tokens(batch) == tokens


def test_a_batch_without_tensors_needs_a_function(tmp_path: Path) -> None:
    with pytest.raises(p2p_diloco.ConfigError, match=r"a batch of type list holds no tensor .* tokens=lambda batch"):
        count_tokens(["text"])
