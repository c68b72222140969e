"""The exported files hold the same model: equal bytes, equal logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from p2p_diloco.app.models.exported_model import llama_files
from p2p_diloco.app.models.model import DecoderModel
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.errors import ConfigError
from p2p_diloco.session.export_files import Provenance
from tests.training.awake import awake_model

PROVENANCE = Provenance(run_name="night", run="ab" * 32, text="a text", rounds=12, cycles=6.0)


def files_of(model: DecoderModel, provenance: Provenance = PROVENANCE) -> dict[str, bytes]:
    return llama_files(model.shape, dict(model.named_parameters()), provenance)


def tensors_of(model: DecoderModel) -> dict[str, Tensor]:
    return load(files_of(model)["model.safetensors"])


def test_every_parameter_is_exported_once_bit_for_bit(shape: ModelShape) -> None:
    model, tensors = awake_model(shape, scale=0.2), tensors_of(awake_model(shape, scale=0.2))
    first = model.blocks[0]
    layer = "model.layers.0."
    stacked = [tensors.pop(f"{layer}self_attn.{part}_proj.weight") for part in "qkv"]
    assert torch.equal(torch.cat(stacked), first.attention.query_key_value)
    gate, up = (tensors.pop(f"{layer}mlp.{part}_proj.weight") for part in ("gate", "up"))
    assert torch.equal(torch.cat((gate, up)), first.feed_forward.gate_up)
    assert torch.equal(tensors.pop(f"{layer}self_attn.o_proj.weight"), first.attention.output)
    assert torch.equal(tensors.pop(f"{layer}mlp.down_proj.weight"), first.feed_forward.down)
    assert torch.equal(tensors.pop(f"{layer}input_layernorm.weight"), first.attention_norm.gain)
    assert torch.equal(tensors.pop(f"{layer}post_attention_layernorm.weight"), first.feed_forward_norm.gain)
    assert torch.equal(tensors.pop("model.embed_tokens.weight"), model.embedding)
    assert torch.equal(tensors.pop("model.norm.weight"), model.norm.gain)
    assert torch.equal(tensors.pop("lm_head.weight"), model.head)
    assert len(tensors) == 9, "only the second block is left"
    assert all(name.startswith("model.layers.1.") for name in tensors)


def test_the_configuration_describes_the_shape(shape: ModelShape) -> None:
    config = json.loads(files_of(awake_model(shape, scale=0.2))["config.json"])
    assert config["architectures"] == ["LlamaForCausalLM"]
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "intermediate_size")
    assert [config[size] for size in sizes] == [2, 16, 2, 8, 24]
    assert (config["max_position_embeddings"], config["vocab_size"]) == (12, 256)
    assert config["tie_word_embeddings"] is False


def test_each_byte_is_one_token(shape: ModelShape) -> None:
    vocabulary = json.loads(files_of(awake_model(shape, scale=0.2))["tokenizer.json"])["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert (vocabulary["d"], vocabulary["Ġ"], vocabulary["Ċ"], vocabulary["Ã"]) == (0x64, 0x20, 0x0A, 0xC3)


def test_the_model_card_states_what_is_known_and_no_licence(shape: ModelShape) -> None:
    model = awake_model(shape, scale=0.2)
    known = replace(PROVENANCE, tokens=1_234_567, held_out_loss=1.4449)
    card = files_of(model, known)["README.md"].decode()
    assert "# night" in card
    assert f"| run id | `{'ab' * 32}` |" in card
    assert "| rounds, cycles | 12, 6.0 |" in card
    assert "| tokens | 1,234,567 by the peer" in card
    assert "| held-out loss | 1.4449 nats per token" in card
    assert "license:" not in card.split("---")[1]
    assert "nats per token, when that peer measured it last" in card
    assert "| state" not in card, "a checkpoint is not of one cycle"
    agreed = files_of(model, replace(known, state="cd" * 32))["README.md"].decode()
    assert f"| state | `{'cd' * 32}`, held by more than half" in agreed
    assert "| held-out loss | 1.4449 nats per token, of these parameters |" in agreed
    unknown = files_of(model)["README.md"].decode()
    assert "| tokens" not in unknown
    assert "held-out" not in unknown


def test_the_name_of_a_run_is_escaped_in_the_card(shape: ModelShape) -> None:
    named = replace(PROVENANCE, run_name="<img src=x> [click](http://x) `a|b`")
    title = files_of(awake_model(shape, scale=0.2), named)["README.md"].decode().splitlines()[7]
    assert title == r"# \<img src=x\> \[click\](http://x) \`a\|b\`"


def test_a_model_whose_tokens_are_not_bytes_is_refused(shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match="the model has 300 tokens; expected 256, one for each byte"):
        files_of(awake_model(replace(shape, vocabulary=300), scale=0.2))


SHAPES = {
    "tiny": ModelShape(layers=3, width=160, heads=5, feed_forward=432, context=64),
    "one head, long context": ModelShape(layers=2, width=64, heads=1, feed_forward=96, context=1024),
    "many heads": ModelShape(layers=2, width=96, heads=12, feed_forward=40, context=32),
}


@pytest.fixture(params=SHAPES, name="exported")
def _exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DecoderModel, Path]:
    """Return a model of random parameters and the folder of its files."""
    model = awake_model(SHAPES[request.param], scale=0.2)
    for name, content in files_of(model).items():
        (tmp_path / name).write_bytes(content)
    return model, tmp_path


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs transformers: make extras brings it")


def test_transformers_computes_the_same_logits(transformers: Any, exported: tuple[DecoderModel, Path]) -> None:
    model, folder = exported
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), "every tensor is used, none is missing"
    assert theirs.dtype == torch.float32
    tokens_BT = torch.randint(0, 256, (2, model.shape.context), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected_BTV, got_BTV = model(tokens_BT), theirs(tokens_BT).logits
    assert expected_BTV.std() > 0.5, "the logits are not trivial"
    assert (got_BTV - expected_BTV).abs().max().item() <= 1e-5


@pytest.mark.parametrize("exported", ["many heads"], indirect=True)
def test_their_tokenizer_encodes_and_decodes_bytes(transformers: Any, exported: tuple[DecoderModel, Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported[1])
    for text in ("def main():\n\treturn  0  ", "naïve – 中文 🙂", " leading", "\r\n\x00\x7f<s></s>"):
        assert tokenizer(text).input_ids == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 256


@pytest.mark.parametrize("exported", ["tiny"], indirect=True)
def test_their_greedy_text_matches_ours(transformers: Any, exported: tuple[DecoderModel, Path]) -> None:
    from itertools import islice

    from p2p_diloco.app.models.sampling import continue_text
    from p2p_diloco.app.models.text_model import decoder_text_model

    model, folder = exported
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    text = theirs.generate(torch.tensor([list(b"def ")]), do_sample=False, max_new_tokens=40)
    ours = islice(continue_text(decoder_text_model(model), b"def ", tokens=256, temperature=0.0, seed=0), 40)
    assert text[0, 4:].tolist() == list(ours)
