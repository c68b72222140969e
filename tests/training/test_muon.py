"""Muon compared with PyTorch's own, which works in bfloat16, one matrix at a time."""

from __future__ import annotations

import pytest
import torch

from p2p_diloco.app.training import muon
from p2p_diloco.app.training.muon import Muon, orthogonal

SHAPES = [(16, 40), (40, 16), (24, 24), (16, 40)]


def matrices(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(parameters: list[torch.nn.Parameter], seed: int) -> None:
    for parameter, gradient in zip(parameters, matrices(seed), strict=True):
        parameter.grad = gradient.detach()


def test_steps_agree_with_those_of_pytorchs_muon() -> None:
    ours, theirs = matrices(), matrices()
    mine = Muon([{"params": ours}], learning_rate=0.02, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for seed in range(1, 6):
        for parameters, optimizer in ((ours, mine), (theirs, reference)):
            give_gradients(parameters, seed)
            optimizer.step()
    for one, other, start in zip(ours, theirs, matrices(), strict=True):
        moved, apart = (other - start).norm(), (one - other).norm()
        assert apart < 0.02 * moved  # eight bits of mantissa, five iterations, five steps


@pytest.mark.parametrize("shape", [(3, 16, 40), (1, 24, 24), (2, 1, 8)])
def test_singular_values_end_close_to_one_and_directions_stay(shape: tuple[int, int, int]) -> None:
    matrices_Bmn = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    # No value is small: five iterations raise a small one only part of the way.
    left, values, right = torch.linalg.svd(matrices_Bmn, full_matrices=False)
    matrices_Bmn = left @ torch.diag_embed(values.clamp(min=0.1 * float(values.max()))) @ right
    made = orthogonal(matrices_Bmn)
    # The result is still diagonal in the basis of the old singular vectors.
    turned = left.mT @ made @ right.mT
    assert torch.allclose(turned, torch.diag_embed(torch.diagonal(turned, dim1=-2, dim2=-1)), atol=1e-4)
    diagonal = torch.diagonal(turned, dim1=-2, dim2=-1)
    assert ((diagonal > 0.65) & (diagonal < 1.25)).all()


def test_the_scale_of_gradients_does_not_matter_and_zeros_stay() -> None:
    matrices_Bmn = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(orthogonal(matrices_Bmn * 1e-4), orthogonal(matrices_Bmn), atol=1e-4)
    assert orthogonal(torch.zeros(1, 4, 8)).abs().max() == 0.0


def test_stacking_matrices_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    together, alone = matrices(), matrices()
    for parameters in (together, alone):
        give_gradients(parameters, 7)
    Muon([{"params": together}], learning_rate=0.1, weight_decay=0.0).step()
    monkeypatch.setattr(muon, "_MOST_STACKED", 1)
    Muon([{"params": alone}], learning_rate=0.1, weight_decay=0.0).step()
    for one, other in zip(together, alone, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_parameter_without_a_gradient_stays() -> None:
    parameters = matrices()
    before = parameters[1].detach().clone()
    give_gradients(parameters, 2)
    parameters[1].grad = None
    Muon([{"params": parameters}], learning_rate=0.1, weight_decay=0.5).step()
    assert torch.equal(parameters[1], before)
    assert not torch.equal(parameters[0], matrices()[0])
