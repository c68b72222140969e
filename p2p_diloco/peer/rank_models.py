"""The models of all ranks of an island: equal where they must be, and compared with the run's model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import sha256
from p2p_diloco.training.ranks import Ranks
from p2p_diloco.training.shards import is_sharded, local_part


class RankModels:
    """The models of all ranks of an island, compared; rank 0 keeps what it needs to compare them with the run.

    Args:
        ranks: the ranks, which all make the same calls.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._rest: list[dict[str, bytes]] = []

    def compare_tables(self, tensors: Mapping[str, Tensor], rest: Iterator[tuple[str, Tensor]]) -> None:
        """Check on rank 0 that all ranks have tensors of the same names and shapes.

        Raises:
            ConfigError: they have not.
        """
        table = {
            kind: {name: f"{tuple(tensor.shape)}{' in shards' if is_sharded(tensor) else ''}" for name, tensor in named}
            for kind, named in (("train", tensors.items()), ("hold", rest))
        }
        for rank, text in enumerate(self._ranks.gather_texts(json.dumps(table))):
            for kind, others in json.loads(text).items():
                for name in dict.fromkeys((*table[kind], *others)):
                    own, other = table[kind].get(name), others.get(name)
                    if own != other:
                        raise ConfigError(
                            f"rank {rank} does not {kind} the same tensors as rank 0: {name} is "
                            f"{_of_shape(other)} there and {_of_shape(own)} on rank 0; build the same model on all "
                            "ranks"
                        )

    def compare_values(self, tensors: Mapping[str, Tensor], rest: Mapping[str, bytes]) -> None:
        """Check on rank 0 that all ranks hold the same values of trained tensors that are not sharded.

        Raises:
            ConfigError: they do not.
        """
        whole = {name: local_part(tensor) for name, tensor in tensors.items() if not is_sharded(tensor)}
        parts = {name: described(name, tensor).hex() for name, tensor in whole.items()}
        said = {"trained": parts, "rest": {name: part.hex() for name, part in rest.items()}}
        others = [json.loads(text) for text in self._ranks.gather_texts(json.dumps(said))]
        for rank, other in enumerate(others):
            differs = next((name for name, part in parts.items() if other["trained"][name] != part), None)
            if differs is not None:
                raise ConfigError(
                    f"parameter {differs} has other values on rank {rank} than on rank 0; start all ranks from the "
                    "same values, for example by wrapping the model in DistributedDataParallel before it joins"
                )
        self._rest = [{name: bytes.fromhex(part) for name, part in other["rest"].items()} for other in others]

    def rest(self, ignored: Sequence[str]) -> dict[str, bytes]:
        """Return the names and digests of rank 0's frozen tensors and buffers, if those of all ranks are equal.

        Args:
            ignored: names of those that may differ.
        Raises:
            ConfigError: they differ.
        """
        own = {name: part for name, part in self._rest[0].items() if name not in ignored}
        for rank, other in enumerate(self._rest):
            # Shards are gathered on rank 0, so the others have no digest of them.
            differs = next((name for name, part in own.items() if other[name] and other[name] != part), None)
            if differs is not None:
                raise ConfigError(
                    f"tensor {differs}, which is not trained, has other values on rank {rank} than on rank 0; load "
                    "the same model on all ranks"
                )
        return own


def _of_shape(shape: str | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


def described(name: str, tensor: Tensor) -> bytes:
    """Return a line with name, type and shape of a tensor, and the digest of its bytes."""
    value = tensor.detach().cpu().contiguous()
    line = f"{name} {value.dtype} {tuple(value.shape)}\n".encode()
    return line + (sha256(value.flatten().view(torch.uint8).numpy().tobytes()) if value.numel() else b"")
