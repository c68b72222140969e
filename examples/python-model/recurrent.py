"""A model of your own: a recurrent network over bytes. Every peer needs this file; it is never sent."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

WIDTH = 128


class Recurrent(nn.Module):
    """An embedding, a GRU and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def loss(self, windows_BT: Tensor) -> Tensor:
        """Return the mean loss in nats per predicted token; each token but the first of a window is predicted."""
        hidden, _ = self.layers(self.embedding(windows_BT[:, :-1]))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), windows_BT[:, 1:].flatten())


def build() -> nn.Module:
    """Return the model; p2p-diloco calls this at every peer."""
    return Recurrent()
