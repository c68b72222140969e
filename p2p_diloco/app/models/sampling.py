"""Generate text with a trained model, token by token; without a tokenizer, each byte is a token."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any, cast

import torch
from torch import Tensor

from p2p_diloco.app.models.model import DecoderModel, KeyValueCache
from p2p_diloco.app.models.text_model import TextModel, logits_of
from p2p_diloco.app.text.tokenizer_files import TOKENIZER, TokenizerFiles
from p2p_diloco.errors import ConfigError, StateError, has_unseen
from p2p_diloco.wording import install_line

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
_LAYOUT = frozenset("\n\t")
_CACHES = ("cache", "past_key_values", "cache_params", "state")
"""Names of a cache in versions and architectures of transformers, both as an argument and in the output."""
_CACHE_ROUNDING = 1e-3
_DECODED_BEFORE = 8


def continue_text(
    model: TextModel, prompt: Sequence[int], *, tokens: int, ends: Sequence[int] = (), temperature: float, seed: int
) -> Iterator[int]:
    """Yield generated tokens after `prompt`, each as soon as it is drawn, up to a token that ends the text.

    The model sees at most its context. When the context is full, generation continues from its last half, so that
    almost every token costs only one position. The same seed gives the same tokens on the same machine.

    Args:
        model: its forward pass gives logits.
        prompt: at least one token; only the last `context` tokens are used.
        tokens: number of tokens that the text has; of a larger model, the others are never drawn.
        ends: tokens that end the text; they are not yielded.
        temperature: 0 takes the most likely token, 1 samples from the model's distribution, higher is more random.
    Raises:
        ConfigError: the prompt is empty, the temperature or the seed is invalid, or the forward pass gives no logits.
        StateError: the model's output is not finite, because its run has diverged.
    """
    if not prompt:
        raise ConfigError('the prompt is empty; expected at least one token, such as "def "')
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise ConfigError(
            f"the temperature is {temperature:g}; expected 0 (the most likely token) or more, such as 0.8"
        )
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"the seed is {seed}; expected 0 to 2^63 - 1")
    reader = _Reader(model)
    logits_V = reader.read(prompt[-model.context :])  # before anything is printed, because this may fail
    drawn = _drawn_tokens(reader, logits_V, tokens, temperature, torch.Generator().manual_seed(seed))
    return takewhile(lambda token: token not in ends, drawn)


def encode_prompt(tokenizer: TokenizerFiles | None, prompt: bytes) -> list[int]:
    """Return the tokens of a prompt, after the token that begins a text if there is one.

    Args:
        tokenizer: the files of the run's tokenizer; None: each byte is a token.
    Raises:
        ConfigError: the package tokenizers is not installed, or cannot read the files.
    """
    if tokenizer is None:
        return list(prompt)
    begin = tokenizer.special().begin
    ids: list[int] = _loaded(tokenizer).encode(prompt.decode(errors="replace"), add_special_tokens=False).ids
    return ids if begin is None or not prompt else [begin, *ids]


def decoded(
    tokenizer: TokenizerFiles | None, prompt: bytes, written: Iterable[int], *, num_bytes: int
) -> Iterator[str]:
    """Yield the prompt and then the text of the tokens `written` after it, piece by piece, as `readable_text` does.

    A piece ends where a character does: the bytes of one may lie in several tokens.

    Args:
        num_bytes: ends the text once it has so many bytes, or so many tokens.
    """
    written = islice(written, num_bytes)
    if tokenizer is None:
        yield from readable_text(chain(prompt, written))
        return
    yield from readable_text(prompt)
    decode = partial(_loaded(tokenizer).decode, skip_special_tokens=False)
    # Some decoders omit the space before the first token, so new tokens are decoded after some that were written.
    ids = encode_prompt(tokenizer, prompt)[-_DECODED_BEFORE:]
    start, shown = 0, len(ids)
    for token in written:
        ids.append(token)
        before, text = decode(ids[start:shown]), decode(ids[start:])
        if not text.endswith(UNREADABLE):
            yield _without_controls(text[len(before) :])
            start, shown = shown, len(ids)
            num_bytes -= len(text[len(before) :].encode())
            if num_bytes <= 0:
                return
    yield _without_controls(decode(ids[start:])[len(decode(ids[start:shown])) :])


def readable_text(written: Iterable[int]) -> Iterator[str]:
    """Yield printable text from bytes, as soon as a character is complete.

    A model can generate any bytes. Invalid UTF-8, and control characters other than line feed and tab, become U+FFFD,
    so that the output cannot control the terminal.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in written:
        yield _without_controls(decoder.decode(bytes([byte])))
    yield _without_controls(decoder.decode(b"", final=True))


def _without_controls(text: str) -> str:
    return "".join(UNREADABLE if has_unseen(each) and each not in _LAYOUT else each for each in text)


def _loaded(tokenizer: TokenizerFiles) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            f"this run has a tokenizer, which needs the package tokenizers: {install_line('hf')}"
        ) from None
    try:
        return tokenizers.Tokenizer.from_str(tokenizer.texts[TOKENIZER])
    except Exception as error:  # of the package's own class
        raise ConfigError(f"the package tokenizers cannot read the run's tokenizer: {error}") from None


def _drawn_tokens(
    reader: _Reader, logits_V: Tensor, tokens: int, temperature: float, generator: torch.Generator
) -> Iterator[int]:
    while True:
        token = _draw(logits_V[:tokens], temperature, generator)
        yield token
        logits_V = reader.read((token,))


class _Reader:
    """Feeds tokens to a model and keeps those within its context."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._window: list[int] = []
        self._cache: Any = None
        self._is_trusted: bool | None = True if isinstance(model.module, DecoderModel) else None

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read `tokens`; return the logits of the next token, shape (V,)."""
        context = self._model.context
        self._window += tokens
        if len(self._window) > context:
            self._window, self._cache = self._window[-max(1, context // 2) :], None
        if not self._cache:
            tokens = self._window
        if self._is_trusted:
            return self._step(tokens)
        whole_V = self._whole()
        if self._is_trusted is None and hasattr(self._model.module, "generate"):
            self._compare(tokens, whole_V)
        return whole_V

    def _compare(self, tokens: Sequence[int], whole_V: Tensor) -> None:
        """Decide whether to trust the cache: architectures differ in what they keep and how they count positions."""
        had_cache = bool(self._cache)
        try:
            found_V = self._step(tokens)
        except Exception:  # the classes of transformers raise any
            self._is_trusted = False
            return
        is_equal = bool((found_V - whole_V).abs().max() <= _CACHE_ROUNDING * whole_V.abs().max())
        if not (is_equal and self._cache):
            self._is_trusted = False
        elif had_cache:
            self._is_trusted = True

    def _whole(self) -> Tensor:
        """Return the logits after the window, without a cache."""
        logits_1TV = logits_of(self._model.module, torch.tensor([self._window]))
        if logits_1TV is None:
            raise ConfigError(
                f"a forward pass of {type(self._model.module).__name__} with int64 tokens of shape (batch, length) "
                "does not give logits of shape (batch, length, tokens), so only its own code can generate text"
            )
        return logits_1TV[0, -1]

    def _step(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits after `tokens` from the cache of those before, and keep the new cache."""
        module, tokens_1T = self._model.module, torch.tensor([list(tokens)])
        if isinstance(module, DecoderModel):
            self._cache = self._cache or [KeyValueCache() for _ in module.blocks]
            logits_1TV: Tensor = module(tokens_1T, self._cache)
            return logits_1TV[0, -1]
        output = cast(Any, module)(input_ids=tokens_1T, use_cache=True, **(self._cache or {}))
        name = next((name for name in _CACHES if getattr(output, name, None) is not None), None)
        self._cache = None if name is None else {name: getattr(output, name)}
        return cast(Tensor, output.logits[0, -1])


def _draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not bool(torch.isfinite(logits_V).all()):
        raise StateError("the model's output is not finite, so its run has diverged; start a run with other settings")
    if temperature == 0.0:
        return int(logits_V.argmax())
    # Subtract the maximum first, so that the largest weight is 1 at any temperature.
    weights_V = ((logits_V.double() - logits_V.max()) / temperature).exp()
    return int(torch.multinomial(weights_V, 1, generator=generator))
