"""Text that a trained byte model writes: one byte after the other, as it is drawn."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError, StateError, has_unseen
from p2p_diloco.training.model import DecoderModel, KeyValueCache

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
_LAYOUT = frozenset("\n\t")


def continue_text(model: DecoderModel, prompt: bytes, *, temperature: float, seed: int) -> Iterator[int]:
    """Yield the bytes that follow `prompt`, each as soon as it is drawn, without an end.

    The model sees at most its context. When that is full it goes on from the last half, so that all but a few bytes
    cost one position each. The same seed gives the same bytes on the same machine.

    Args:
        prompt: at least one byte; of a long one the model sees the last `context` bytes.
        temperature: 0 takes the likeliest byte, 1 draws as the model predicts, more is more random.
    Raises:
        ConfigError: the prompt is empty, or the temperature or the seed does not fit.
        StateError: the model predicts nothing, because its run has diverged.
    """
    if not prompt:
        raise ConfigError('the prompt is empty; expected at least one byte to go on from, such as "def "')
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise ConfigError(f"the temperature is {temperature:g}; expected 0 (the likeliest byte) or more, such as 0.8")
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"the seed is {seed}; expected 0 to 2^63 - 1")
    return _drawn_bytes(model, prompt, temperature, torch.Generator().manual_seed(seed))


def readable_text(written: Iterable[int]) -> Iterator[str]:
    """Yield what may be shown of bytes, as soon as a character is complete.

    A model writes any bytes. What is no UTF-8, and each control character but line feed and tab, becomes U+FFFD: none
    of it can move a cursor or name a window.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in written:
        yield _without_controls(decoder.decode(bytes([byte])))
    yield _without_controls(decoder.decode(b"", final=True))


def _without_controls(text: str) -> str:
    return "".join(UNREADABLE if has_unseen(each) and each not in _LAYOUT else each for each in text)


def _drawn_bytes(model: DecoderModel, prompt: bytes, temperature: float, generator: torch.Generator) -> Iterator[int]:
    reader = _Reader(model)
    logits_V = reader.read(prompt[-model.shape.context :])
    while True:
        byte = _draw(logits_V, temperature, generator)
        yield byte
        logits_V = reader.read((byte,))


class _Reader:
    """Feeds a model and remembers what it has read, up to its context."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._window: list[int] = []
        self._caches: list[KeyValueCache] = []

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits, shape (V,), of what follows all that was read."""
        context = self._model.shape.context
        self._window += tokens
        if len(self._window) > context:
            tokens = self._window = self._window[-max(1, context // 2) :]
            self._caches = []
        if not self._caches:
            self._caches = [KeyValueCache() for _ in self._model.blocks]
        logits_1TV: Tensor = self._model(torch.tensor([list(tokens)]), self._caches)
        return logits_1TV[0, -1]


def _draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not bool(torch.isfinite(logits_V).all()):
        raise StateError("the model predicts no finite numbers, so its run has diverged; start a run with other values")
    if temperature == 0.0:
        return int(logits_V.argmax())
    # Less the largest first: whatever the temperature, that one's weight is 1.
    weights_V = ((logits_V.double() - logits_V.max()) / temperature).exp()
    return int(torch.multinomial(weights_V, 1, generator=generator))
