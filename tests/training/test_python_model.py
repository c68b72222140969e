"""Models from a function of the user's own."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from p2p_diloco.app.models.python_model import code_digest, python_model
from p2p_diloco.errors import ConfigError

SOURCE = """
from torch import nn
from torch.nn import functional

class Bigrams(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def loss(self, windows):
        return functional.cross_entropy(self.table(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

def build():
    return Bigrams()

def pair():
    return Bigrams(), lambda module, windows: 2.0 * module.loss(windows)

def fails():
    raise RuntimeError("no such thing")

def nothing():
    return 7

def without_loss():
    return nn.Linear(2, 2)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "bigrams_of_mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("bigrams_of_mine", None)


def test_a_function_in_the_working_directory_gives_a_model_and_its_loss() -> None:
    windows = torch.randint(0, 256, (2, 9))
    model = python_model("python:bigrams_of_mine:build", context=8, vocabulary=256)
    assert model.loss(model.module, windows).item() > 4.0
    torch.manual_seed(0)
    alone = python_model("python:bigrams_of_mine:build", context=8, vocabulary=256)
    torch.manual_seed(0)
    paired = python_model("python:bigrams_of_mine:pair", context=8, vocabulary=256)
    assert paired.loss(paired.module, windows).item() == 2.0 * alone.loss(alone.module, windows).item()


def test_the_digest_is_that_of_the_file_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "explosive_of_mine.py").write_text("raise SystemExit(3)\n")
    expected = hashlib.sha256((tmp_path / "explosive_of_mine.py").read_bytes()).hexdigest()
    assert code_digest("python:explosive_of_mine:build") == expected
    assert "explosive_of_mine" not in sys.modules


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("python:nowhere_of_mine:build", r"there is no Python module nowhere_of_mine here; run this in the folder of"),
        ("python:bigrams_of_mine:missing", r"python:bigrams_of_mine:missing failed: AttributeError"),
        ("python:bigrams_of_mine:fails", r"python:bigrams_of_mine:fails failed: RuntimeError: no such thing"),
        ("python:bigrams_of_mine:nothing", r"returned int; expected an nn.Module, or a module and its loss"),
        ("python:bigrams_of_mine:without_loss", r"has no loss; give it a method loss\(windows\), or return a pair"),
        ("python:math:sqrt", r"there is no Python module math here"),
    ],
)
def test_what_is_not_a_model_is_named(source: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        python_model(source, context=8, vocabulary=256)
