"""The model that all peers build alike: a small network that learns to add eight numbers."""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Adder(lightning.LightningModule):
    """Build the layers. Their initial values only matter for the peer that founds the run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def loss(self, numbers: Tensor) -> Tensor:
        """Return the mean squared error of the sums."""
        return nn.functional.mse_loss(self.layers(numbers), numbers.sum(dim=1, keepdim=True))

    def training_step(self, batch: tuple[Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(batch[0])

    def validation_step(self, batch: tuple[Tensor], _: int) -> None:
        """Log the loss of a batch of the held-out numbers."""
        self.log("val_loss", self.loss(batch[0]), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimiser."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_loader(num_sums: int, seed: int | None = None) -> DataLoader[tuple[Tensor, ...]]:
    """Return problems in batches of 64; without a seed, other ones in each process."""
    draw = torch.Generator()
    draw.seed() if seed is None else draw.manual_seed(seed)
    return DataLoader(TensorDataset(torch.rand(num_sums, 8, generator=draw)), batch_size=64, shuffle=seed is None)
