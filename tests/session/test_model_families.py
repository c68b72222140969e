"""Families of transformers, one small model of each: what `new` takes is trained, exported, reloaded and generates."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from p2p_diloco.app.models.exported_model import check_export, files_of, provenance_of
from p2p_diloco.app.models.run_model import build_learnt_model, build_run_model, describe_source, tokenizer_of
from p2p_diloco.app.models.sampling import continue_text, encode_prompt
from p2p_diloco.app.text.tokenizer_files import TokenizerFiles, byte_tokenizer
from p2p_diloco.config.manifest import ModelSection
from p2p_diloco.config.new_file import write_new_folder
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.errors import ConfigError
from p2p_diloco.island.parameters import trained
from p2p_diloco.session.learnt_model import LearntModel

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

END, PAD, TURN = 256, 257, 258
LESSON = b"hello families!"
SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
NO_DROPOUT = dict.fromkeys(
    """resid_pdrop embd_pdrop attn_pdrop attention_dropout hidden_dropout dropout embed_dropout resid_dropout
    attention_probs_dropout_prob hidden_dropout_prob activation_dropout""".split(),
    0.0,
)
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
STATES = {"state_size": 8, "num_heads": 8, "n_groups": 1, "expand": 2, "time_step_rank": 4}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
OLD = {"num_attention_heads": 4, "num_key_value_heads": 4}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SCALED = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 500000.0}

WORK: dict[str, dict[str, Any]] = {
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama padded": {"model_type": "llama", "vocab_size": 320},
    "llama bfloat16": {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "rope_scaling": {**SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "llama flash attention": {"model_type": "llama", "_attn_implementation": "flash_attention_2"},
    "llama attention": {"model_type": "llama", "attn_implementation": "flash_attention_2"},
    "llama foreign tokens": {"model_type": "llama", "pad_token_id": 0, "bos_token_id": 128000, "eos_token_id": [2, 3]},
    "llama tasks": {"model_type": "llama", "task_specific_params": {"text-generation": {"max_length": 50}}},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2", "sliding_window": 16},
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": 16},
    "gemma3": {"model_type": "gemma3", "text_config": SMALL, "vision_config": {**VISION, "image_size": 56}},
    "gpt_neox": {"model_type": "gpt_neox"},
    "mamba": {"model_type": "mamba", **STATES},
    "mamba2": {"model_type": "mamba2", **STATES, "time_step_limit": [0.0, float("inf")]},
    "gpt2": {"model_type": "gpt2", **GPT},
    "opt": {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"model_type": "bloom", "n_layer": 2, "n_head": 4},
    "falcon": {"model_type": "falcon", "head_dim": None},
    "bert decoder": {"model_type": "bert", "is_decoder": True},
    "mixtral": {"model_type": "mixtral", **EXPERTS},
    "rwkv": {"model_type": "rwkv", "num_hidden_layers": 7, "attention_hidden_size": 32, "context_length": 64},
    "phi": {"model_type": "phi", **OLD},
    "phi3": {"model_type": "phi3"},
    "gpt_neo": {
        "model_type": "gpt_neo",
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
    },
    "gptj": {"model_type": "gptj", **GPT},
    "codegen": {"model_type": "codegen", **GPT},
    "olmo": {"model_type": "olmo"},
    "olmo2": {"model_type": "olmo2"},
    "stablelm": {"model_type": "stablelm"},
    "cohere": {"model_type": "cohere", "logit_scale": 1.0},
    "granite": {"model_type": "granite"},
    "starcoder2": {"model_type": "starcoder2"},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "output_router_logits": True,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "recurrent_gemma": {
        "model_type": "recurrent_gemma",
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": 16,
    },
    "biogpt": {"model_type": "biogpt", **OLD},
    "xglm": {"model_type": "xglm", "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "smollm3": {"model_type": "smollm3"},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **GPT},
    "mpt": {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "roberta decoder": {"model_type": "roberta", "is_decoder": True, "max_position_embeddings": 80},
    "gpt_oss": {"model_type": "gpt_oss", **EXPERTS, "sliding_window": 16},
    "jamba": {
        "model_type": "jamba",
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "glm4": {"model_type": "glm4"},
    "nemotron": {"model_type": "nemotron"},
    "granitemoe": {"model_type": "granitemoe", **EXPERTS},
    "phimoe": {"model_type": "phimoe", **EXPERTS},
    "ctrl": {"model_type": "ctrl"},
    "openai-gpt": {"model_type": "openai-gpt", **GPT},
    "falcon_mamba": {"model_type": "falcon_mamba", **STATES},
    "lfm2": {"model_type": "lfm2"},
    "llama4_text": {"model_type": "llama4_text"},
    "qwen3_next": {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
    "bart decoder": {
        "model_type": "bart",
        "is_encoder_decoder": False,
        "is_decoder": True,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
    },
}


def tokenizer_files() -> TokenizerFiles:
    """Return a tokenizer of bytes and three tokens with a meaning, of which two end a text."""
    file = byte_tokenizer()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    file["added_tokens"] = [
        {"id": number, "content": f"<{number}>", "special": True, **flags} for number in (END, PAD, TURN)
    ]
    texts = {
        "tokenizer.json": file,
        "tokenizer_config.json": {"eos_token": f"<{END}>", "pad_token": f"<{PAD}>", "model_max_length": 1 << 20},
        "generation_config.json": {"eos_token_id": [END, TURN], "bos_token_id": 1},
    }
    return TokenizerFiles({name: json.dumps(text) for name, text in texts.items()})


def planned(folder: Path, config: dict[str, Any]) -> RunPlan:
    """Return the plan of a run that trains a model of this configuration on tokens, as `new` makes it."""
    folder.mkdir()
    whole = {key: value for key, value in {**SMALL, **NO_DROPOUT, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(whole))
    section = ModelSection.model_validate({"source": f"hf:{folder}", "vocabulary": 259, "context": 32})
    described = {
        key: value for key, value in describe_source(section, tokenizer_files())[0].items() if value is not None
    }
    model = {"source": section.source, **described, "context": 32}
    return plan_run(draft_manifest(now_seconds=1.0, values={"model": model, "rounds.fragments": 1}))


@pytest.mark.parametrize("name", WORK)
def test_a_family_is_trained_exported_and_generates_to_its_end(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason='pip install "p2p-diloco[hf]" brings it')
    torch.manual_seed(0)
    plan = planned(tmp_path / "source", WORK[name])
    model = build_run_model(plan, None, founds=True)
    window_1T = torch.tensor([[*LESSON, END, *LESSON, END]])
    optimizer = torch.optim.AdamW(trained(model.module).values(), lr=1e-2, weight_decay=0.0)
    for _ in range(80):
        optimizer.zero_grad()
        loss = model.loss(model.module, window_1T)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.4, "it has learnt its lesson"
    parameters = {key: tensor.detach().clone() for key, tensor in trained(model.module).items()}
    learnt = LearntModel(plan=plan, parameters=parameters, rounds=3, tokenizer=tokenizer_files().encode())
    files = files_of(learnt, provenance_of(learnt, None))
    write_new_folder(tmp_path / "out", files, check=lambda draft: check_export(learnt, None, draft))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.generation_config.eos_token_id == [END, TURN]
    assert exported.generation_config.pad_token_id == tokenizer.pad_token_id == PAD
    assert exported.config.bos_token_id is exported.generation_config.bos_token_id is None
    # These two count positions from the padding token of their configuration.
    assert exported.config.pad_token_id == (1 if name in ("roberta decoder", "xglm") else PAD)
    prompt = tokenizer("hello ", return_tensors="pt").input_ids
    theirs = exported.generate(prompt, do_sample=False, max_new_tokens=20)[0].tolist()
    # For RoBERTa, generate() numbers positions from 0, and forward() from the padding token.
    assert theirs == [*LESSON, END] or name == "roberta decoder"
    own = continue_text(
        build_learnt_model(learnt, None), encode_prompt(tokenizer_of(learnt), b"hello "), tokens=259,
        ends=(END, TURN), temperature=0.0, seed=0,
    )  # fmt: skip
    assert bytes(islice(own, 20)) == b"families!"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({"model_type": "bert"}, 'looks ahead: .* so it cannot be trained .*; set "is_decoder": true'),
    "roberta": ({"model_type": "roberta", "max_position_embeddings": 80}, "looks ahead: "),
    "electra": ({"model_type": "electra", "embedding_size": 32}, 'looks ahead: .*; set "is_decoder": true'),
    "xlm": ({"model_type": "xlm", "emb_dim": 32, "n_layers": 2, "n_heads": 4}, '; set "causal": true'),
    "xlnet": (
        {"model_type": "xlnet", "d_head": 8, "max_position_embeddings": None},
        "looks ahead: .*; name a decoder-only model",
    ),
    "t5": ({"model_type": "t5"}, "t5 is an encoder-decoder and cannot be trained as a causal language model"),
    "bart": ({"model_type": "bart"}, "bart is an encoder-decoder"),
    "whisper": ({"model_type": "whisper"}, "whisper is an encoder-decoder"),
    "clip": ({"model_type": "clip"}, "clip_text_model is no causal language model of transformers"),
    "vit": ({"model_type": "vit"}, "vit is no causal language model of transformers"),
    "reformer": ({"model_type": "reformer"}, "cannot build the run's reformer model .*`is_decoder=True`"),
    "gptq": ({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantised"),
    "unknown": ({"model_type": "of_tomorrow"}, "cannot read the model"),
    "own code": ({"model_type": "llama", "auto_map": {"AutoConfig": "own.Config"}}, "needs its own code"),
    "not a number": ({"model_type": "llama", "rms_norm_eps": float("nan")}, "the loss of .* is .*nan"),
    "odd heads": ({"model_type": "llama", "num_attention_heads": 5}, "cannot (read|build) the"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_trained_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason='pip install "p2p-diloco[hf]" brings it')
    config, text = REFUSED[name]
    with pytest.raises(ConfigError, match=text) as refusal:
        planned(tmp_path / "source", config)
    assert "\n" not in str(refusal.value)


def test_a_configuration_cut_in_the_middle_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason='pip install "p2p-diloco[hf]" brings it')
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"})[:40])
    with pytest.raises(ConfigError, match=r"cannot read the model .*; expected a folder with config.json"):
        describe_source(ModelSection.model_validate({"source": f"hf:{tmp_path}"}))
