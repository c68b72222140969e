"""A safetensors file of the same tensors and facts has the same bytes."""

from __future__ import annotations

import torch
from safetensors.torch import load, save

from p2p_diloco.session.export_files import tensor_bytes

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([1.5]), "half": torch.ones(3, dtype=torch.float16)}
FACTS = dict.fromkeys("qwertyuiop", "value")


def test_the_bytes_do_not_depend_on_chance() -> None:
    files = {tensor_bytes(TENSORS, FACTS) for _ in range(20)}
    assert len(files) == 1
    assert len({save(TENSORS, metadata=FACTS) for _ in range(20)}) > 1, "then this module is not needed any more"


def test_the_file_is_read_like_any_other() -> None:
    raw = tensor_bytes(TENSORS, {"run": "ab" * 32, "name": "ä \n"})
    loaded = load(raw)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    begin = 8 + int.from_bytes(raw[:8], "little")
    assert begin % 8 == 0, "tensors are aligned"
