"""Text is sampled with the model's probabilities, and shown without control characters."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import pytest
import torch

from p2p_diloco.app.models.model import DecoderModel, build_model
from p2p_diloco.app.models.sampling import continue_text, decoded, readable_text
from p2p_diloco.app.models.text_model import decoder_text_model
from p2p_diloco.app.text.tokenizer_files import TokenizerFiles, byte_tokenizer
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.errors import ConfigError, StateError
from tests.training.awake import awake_model


@pytest.fixture
def model(shape: ModelShape) -> DecoderModel:
    return awake_model(shape)


def written(model: DecoderModel, prompt: bytes, num_bytes: int, *, temperature: float = 0.0, seed: int = 0) -> bytes:
    return bytes(
        islice(
            continue_text(decoder_text_model(model), prompt, tokens=256, temperature=temperature, seed=seed), num_bytes
        )
    )


def likeliest(model: DecoderModel, window: bytes) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([list(window)]))[0, -1].argmax())


def test_at_temperature_0_each_byte_is_the_most_likely_one(model: DecoderModel) -> None:
    text = b"ab" + written(model, b"ab", 40)
    # The context is 12 bytes: a full window continues from its last 6.
    start = 0
    for end in range(2, len(text)):
        if end - start > 12:
            start = end - 6
        assert text[end] == likeliest(model, text[start:end]), f"byte {end}"


def test_only_the_end_of_a_long_prompt_counts(model: DecoderModel) -> None:
    prompt = bytes(range(40, 80))
    assert written(model, prompt, 1)[0] == likeliest(model, prompt[-12:])


def test_a_context_of_one_byte_is_enough(shape: ModelShape) -> None:
    assert len(written(build_model(replace(shape, context=1), seed=0), b"abc", 5)) == 5


def test_bytes_are_drawn_with_the_models_probabilities(model: DecoderModel) -> None:
    with torch.no_grad():
        expected_V = (model(torch.tensor([[97]]))[0, -1] / 2.0).softmax(-1)
    firsts = [written(model, b"a", 1, temperature=2.0, seed=seed)[0] for seed in range(2_000)]
    top = int(expected_V.argmax())
    share = firsts.count(top) / len(firsts)
    spread = (expected_V[top].item() / len(firsts)) ** 0.5
    assert abs(share - expected_V[top].item()) < 4 * spread


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model: DecoderModel) -> None:
    first, second, other = (written(model, b"a", 30, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_a_tiny_temperature_acts_like_0(model: DecoderModel) -> None:
    assert written(model, b"a", 20, temperature=1e-300) == written(model, b"a", 20)


@pytest.mark.parametrize(
    ("prompt", "temperature", "seed", "text"),
    [
        (b"", 1.0, 0, r"the prompt is empty; expected at least one token, such as \"def \""),
        (b"a", -0.5, 0, r"the temperature is -0.5; expected 0 \(the most likely token\) or more, such as 0.8"),
        (b"a", float("nan"), 0, r"the temperature is nan; expected 0"),
        (b"a", 1.0, -1, r"the seed is -1; expected 0 to 2\^63 - 1"),
        (b"a", 1.0, 1 << 63, r"the seed is 9223372036854775808; expected 0"),
    ],
)
def test_invalid_arguments_are_refused_at_once(
    model: DecoderModel, prompt: bytes, temperature: float, seed: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        continue_text(decoder_text_model(model), prompt, tokens=256, temperature=temperature, seed=seed)


def test_a_diverged_run_is_reported(model: DecoderModel) -> None:
    with torch.no_grad():
        model.head.fill_(3e38)
    with pytest.raises(StateError, match="output is not finite, so its run has diverged"):
        written(model, b"a", 1)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"def f():\n\treturn 1", "def f():\n\treturn 1"),
        ("naïve 中".encode(), "naïve 中"),
        (b"\x1b[2J\x1b]0;owned\x07", "\ufffd[2J\ufffd]0;owned\ufffd"),
        (b"a\rb\x00\x7f\x08", "a\ufffdb\ufffd\ufffd\ufffd"),
        (b"\xff\xfe ok \xc3", "\ufffd\ufffd ok \ufffd"),
        ("\u009b31m \u202eevil \u2028".encode(), "\ufffd31m \ufffdevil \ufffd"),
    ],
)
def test_no_control_character_is_shown(raw: bytes, shown: str) -> None:
    assert "".join(readable_text(raw)) == shown


def test_a_character_is_shown_once_it_is_complete() -> None:
    assert list(readable_text("aé".encode())) == ["a", "", "é", ""]


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    pytest.importorskip("tokenizers", reason='pip install "p2p-diloco[hf]" brings it')
    files = TokenizerFiles({"tokenizer.json": json.dumps(byte_tokenizer())})
    written = [*"é 🙂!".encode(), 0xFF, 0x1B]
    pieces = list(decoded(files, "中 ".encode(), written, num_bytes=100))
    assert "".join(pieces) == "中 é 🙂!\ufffd\ufffd"
    assert {"é", "🙂"} <= set(pieces)
    assert "".join(decoded(files, b"a", written, num_bytes=3)) == "aé "
