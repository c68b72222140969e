"""A model from a function of the user's own: `python:module:function`. Its code never travels.

The function takes no arguments and returns an `nn.Module` with a method `loss(windows)`: the mean loss in nats per
predicted token of int64 windows of shape (B, T + 1). Or it returns a pair: a module, and a function
`loss(module, windows)`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from p2p_diloco.app.models.text_model import Loss, TextModel
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import sha256


def code_digest(source: str) -> str:
    """Return the SHA-256 of the file that defines a model, in hexadecimal digits, without running it.

    Args:
        source: `python:module:function`. The module is looked up in the working directory, then as usual.
    Raises:
        ConfigError: there is no such module, or it is not a Python file.
    """
    return sha256(_file_of(_module_of(source)).read_bytes()).hex()


def python_model(source: str, *, context: int, vocabulary: int) -> TextModel:
    """Call the function and return its model.

    Raises:
        ConfigError: the function is missing or fails, or returns something else.
    """
    module_name, function_name = _module_of(source), source.split(":")[2]
    _file_of(module_name)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        made = function()
    except Exception as error:
        raise ConfigError(f"{source} failed: {type(error).__name__}: {error}") from error
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, _own_loss)
    if not isinstance(module, nn.Module) or not callable(loss):
        raise ConfigError(f"{source} returned {type(made).__name__}; expected an nn.Module, or a module and its loss")
    if loss is _own_loss and not callable(getattr(module, "loss", None)):
        raise ConfigError(
            f"the model of {source} has no loss; give it a method loss(windows), or return a pair of the module and "
            "a function loss(module, windows)"
        )
    checked: Loss = loss
    return TextModel(module=module.train(), loss=checked, context=context, vocabulary=vocabulary)


def _own_loss(module: nn.Module, windows_BT: Tensor) -> Tensor:
    loss: Any = module.loss
    result: Tensor = loss(windows_BT)
    return result


def _module_of(source: str) -> str:
    return source.split(":")[1]


def _file_of(module_name: str) -> Path:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.util.find_spec(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"cannot import {module_name}: {error}") from None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise ConfigError(
            f"there is no Python module {module_name} here; run this in the folder of {module_name.partition('.')[0]}, "
            "or install it"
        )
    return Path(found.origin)
