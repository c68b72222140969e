"""Models of transformers in a run: described by the organiser, built by a joiner, refused if they differ."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2p_diloco.app.models.exported_model import check_export, files_of, model_files
from p2p_diloco.app.models.run_model import build_learnt_model, build_run_model, describe_source, make_start
from p2p_diloco.app.models.sampling import continue_text
from p2p_diloco.config.manifest import ModelSection
from p2p_diloco.config.new_file import write_new_folder
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.ids import ZERO_DIGEST
from p2p_diloco.island.parameters import trained
from p2p_diloco.outer.state import genesis_state
from p2p_diloco.session.export_files import Provenance
from p2p_diloco.session.founding import genesis_digest, read_start
from p2p_diloco.session.learnt_model import LearntModel, learnt_model

ORIGIN = Provenance(run_name="models", run="ab" * 32, text=None, rounds=3, cycles=0.75)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
WINDOWS = torch.arange(34).view(2, 17) % 256


def needs(package: str) -> Any:
    return pytest.importorskip(package, reason='pip install "p2p-diloco[hf]" brings it; make models runs this')


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Return the folder of a small Llama with weights."""
    transformers = needs("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def plan_for(folder: Path | str, **values: Any) -> RunPlan:
    """Return the plan of a run of a model, as `new` makes it."""
    source = f"hf:{folder}" if isinstance(folder, Path) else folder
    section = ModelSection.model_validate({"source": source, **values})
    described = {key: value for key, value in describe_source(section)[0].items() if value is not None}
    model = {"model": {"source": source, **values, **described}}
    return plan_run(draft_manifest(now_seconds=1.0, values=model | {"rounds.fragments": 1}))


def test_a_joiner_builds_the_model_from_the_manifest_alone(llama: Path) -> None:
    plan = plan_for(llama)
    (llama / "config.json").unlink()  # a joiner has no such folder
    model = build_run_model(plan, None, founds=False)
    assert (model.context, model.vocabulary) == (64, 256)
    assert {name: tuple(tensor.shape) for name, tensor in trained(model.module).items()} == plan.shapes
    means = {name: mean for name, _, mean in plan.manifest.model.tensors}
    assert [name for name, mean in means.items() if mean == "plain"] == ["model.embed_tokens.weight", "lm_head.weight"]
    loss = model.loss(model.module, WINDOWS)
    expected = model.module(input_ids=WINDOWS, labels=WINDOWS).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_founder_starts_from_new_or_from_loaded_weights(llama: Path) -> None:
    transformers = needs("transformers")
    own = trained(transformers.AutoModelForCausalLM.from_pretrained(llama))
    loaded = build_run_model(plan_for(llama, weights="loaded"), None, founds=True)
    assert all(torch.equal(own[name], tensor) for name, tensor in trained(loaded.module).items())
    plan = plan_for(llama)
    fresh = build_run_model(plan, None, founds=True)
    assert not torch.equal(own["lm_head.weight"], trained(fresh.module)["lm_head.weight"])
    start = make_start(plan)
    assert sum(map(len, start.values())) == plan.num_parameters


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SEES = {"vision_config": {**VISION, "image_size": 56, "patch_size": 14}}


@pytest.mark.parametrize(
    ("kind", "tower"),
    [
        ("gemma3", SEES),
        ("llava", {"vision_config": {**SEES["vision_config"], "model_type": "clip_vision_model"}}),
        ("idefics3", SEES),
        ("qwen2_audio", {"audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2}}),
    ],
)
def test_the_text_part_of_a_model_that_sees_or_hears_is_loaded(
    kind: str, tower: dict[str, Any], tmp_path: Path
) -> None:
    transformers = needs("transformers")
    text = {
        **SMALL,
        "num_key_value_heads": 2,
        "model_type": {"gemma3": "gemma3_text", "qwen2_audio": "qwen2"}.get(kind, "llama"),
    }
    config = transformers.AutoConfig.for_model(kind, text_config=text, **tower)
    torch.manual_seed(1)
    whole = transformers.AutoModelForMultimodalLM.from_config(config)
    whole.save_pretrained(tmp_path / kind)
    own = {tuple(tensor.flatten()[:4].tolist()) for tensor in whole.state_dict().values() if tensor.ndim == 2}
    model = build_run_model(plan_for(tmp_path / kind, weights="loaded"), None, founds=True)
    loaded = [tensor for tensor in trained(model.module).values() if tensor.ndim == 2]
    assert loaded
    assert all(tuple(tensor.flatten()[:4].tolist()) in own for tensor in loaded)


def test_an_exported_model_has_the_logits_of_the_run(llama: Path, tmp_path: Path) -> None:
    transformers = needs("transformers")
    plan = plan_for(llama, weights="loaded")
    model = build_run_model(plan, None, founds=True)
    assert plan.manifest.model.config is not None
    files = model_files(plan.manifest.model.config, trained(model.module), ORIGIN, None)
    write(tmp_path / "out", files)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        difference = exported(WINDOWS).logits - model.module.eval()(WINDOWS).logits
    assert difference.abs().max() <= 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("näh").input_ids == list("näh".encode())


def test_tied_weights_are_trained_once(tmp_path: Path) -> None:
    transformers = needs("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    plan = plan_for(tmp_path / "gpt2")
    assert "lm_head.weight" not in plan.shapes
    assert ("transformer.wte.weight", (256, 16), "plain") in plan.manifest.model.tensors
    model = build_run_model(plan, None, founds=False)
    tokens, positions = model.roles().embedding
    assert tokens is model.module.transformer.wte.weight
    assert positions is model.module.transformer.wpe.weight
    roundtrip = model_files(str(plan.manifest.model.config), trained(model.module), ORIGIN, None)
    write(tmp_path / "out", roundtrip)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        difference = exported(WINDOWS).logits - model.module.eval()(WINDOWS).logits
    assert difference.abs().max() <= 1e-5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
def test_lora_trains_only_its_adapters_on_the_same_base(llama: Path, tmp_path: Path) -> None:
    peft = needs("peft")
    plan = plan_for(llama, weights="loaded", lora_rank=2, lora_targets=["q_proj", "v_proj"])
    assert plan.num_parameters == 2 * 2 * (2 * 32 + 32 + 16)
    assert plan.manifest.model.rest is not None
    with pytest.raises(ConfigError, match="of a base model that is not on the Hugging Face hub; give the folder"):
        build_run_model(plan, None, founds=False)
    model = build_run_model(plan, str(llama), founds=False)
    with torch.no_grad():
        for tensor in trained(model.module).values():
            tensor.normal_(generator=torch.Generator().manual_seed(4))
    learnt = LearntModel(plan=plan, parameters=trained(model.module), rounds=3)
    files = files_of(learnt, ORIGIN)
    write_new_folder(tmp_path / "out", files, check=lambda draft: check_export(learnt, str(llama), draft))
    halved = replace(learnt, parameters={name: tensor / 2 for name, tensor in learnt.parameters.items()})
    with pytest.raises(StateError, match="the export was not written: loaded with transformers, its logits differ"):
        check_export(halved, str(llama), tmp_path / "out")
    tokens = islice(
        continue_text(build_learnt_model(learnt, str(llama)), b"def ", tokens=256, temperature=0.0, seed=0), 8
    )
    assert list(tokens) == greedy(model.module, b"def ", 8)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        difference = loaded(WINDOWS).logits - model.module.eval()(WINDOWS).logits
    assert difference.abs().max() <= 1e-5


def greedy(module: Any, prompt: bytes, num_tokens: int) -> list[int]:
    """Return the likeliest tokens after a prompt, each from a pass over all before it."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_lora_on_another_base_is_refused(llama: Path, tmp_path: Path) -> None:
    transformers = needs("transformers")
    plan = plan_for(llama, weights="loaded", lora_rank=2)
    other = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        other.model.norm.weight[3] += 1.0
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="frozen parameters or buffers of this model differ from those of the run"):
        build_run_model(plan, str(tmp_path / "other"), founds=False)


def test_a_base_model_of_lora_is_not_taken_from_a_path_of_the_organisers(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hf:base` and `hf:models/base` may be folders of the organiser's; here they could be anything."""
    plan = plan_for(llama, weights="loaded", lora_rank=2)
    (llama.parent / "owner").mkdir()
    llama.rename(llama.parent / "owner" / "base")
    monkeypatch.chdir(llama.parent)
    for source in ("hf:owner", "hf:owner/base"):
        model = plan.manifest.model.model_copy(update={"source": source})
        renamed = plan_run(plan.manifest.model_copy(update={"model": model}))
        with pytest.raises(ConfigError, match="give the folder of your copy with --model PATH"):
            build_run_model(renamed, None, founds=False)
        build_run_model(renamed, "owner/base", founds=False)


def test_a_base_model_of_lora_may_take_half_of_the_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(llama, weights="loaded", lora_rank=2)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=8 * 1000))
    with pytest.raises(ConfigError, match="describes a model of more than 1,000 elements"):
        build_run_model(plan, str(llama), founds=False)


def test_a_model_that_differs_from_the_table_is_refused(llama: Path) -> None:
    plan = plan_for(llama)
    section = plan.manifest.model
    wider = json.loads(section.config or "{}") | {"intermediate_size": 64}
    manifest = plan.manifest.model_copy(update={"model": section.model_copy(update={"config": json.dumps(wider)})})
    expected = r"tensor model.layers.0.mlp.gate_proj.weight has shape \(64, 32\) here and \(48, 32\) in the run"
    with pytest.raises(ConfigError, match=expected):
        build_run_model(plan_run(manifest), None, founds=False)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "the run's model.config has no model_type"),
        ({"model_type": "no_such_model"}, "cannot build the run's no_such_model model with transformers"),
        ({"model_type": "llama", "hidden_size": "wide"}, "cannot build the run's llama model with transformers"),
    ],
)
def test_a_config_that_cannot_be_built_is_explained(llama: Path, config: dict[str, Any], text: str) -> None:
    plan = plan_for(llama)
    section = plan.manifest.model.model_copy(update={"config": json.dumps(config)})
    with pytest.raises(ConfigError, match=re.escape(text)):
        build_run_model(plan_run(plan.manifest.model_copy(update={"model": section})), None, founds=False)


def test_a_model_with_its_own_code_or_without_a_config_is_refused(tmp_path: Path, llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "own.Model"}}))
    with pytest.raises(ConfigError, match=r"needs its own code \(auto_map in config.json\)"):
        plan_for(llama)
    with pytest.raises(ConfigError, match=r"cannot read the model .*nowhere"):
        plan_for(tmp_path / "nowhere")


def test_a_context_beyond_the_models_positions_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.context is 65; this llama model has 64 positions"):
        plan_for(llama, context=65)


def test_a_python_model_needs_the_users_consent_and_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one_of_mine.py"
    path.write_text(
        "from torch import nn\n\ndef build():\n"
        "    return nn.Embedding(256, 256), lambda table, w: nn.functional.cross_entropy(\n"
        "        table(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = "python:one_of_mine:build"
    plan = plan_for(source, context=8)
    with pytest.raises(ConfigError, match=f"if you trust it and have its file, start with --model {source}"):
        build_run_model(plan, None, founds=False)
    model = build_run_model(plan, source, founds=False)
    assert model.loss(model.module, WINDOWS[:, :9]).item() > 4.0
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"your file of python:one_of_mine:build has SHA-256 .*, the run's has"):
        build_run_model(plan, source, founds=False)
    sys.modules.pop("one_of_mine", None)


def test_a_run_that_names_a_model_without_describing_it_is_refused() -> None:
    manifest = draft_manifest(now_seconds=1.0, values={"model": {"source": "hf:gpt2"}})
    with pytest.raises(ConfigError, match="make the run file with p2p-diloco new --model hf:gpt2"):
        plan_run(manifest)


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 1 << 20, "num_attention_heads": 1 << 15}, "describes a model of more than"),
        ({"vocab_size": 1 << 31}, "describes a model of more than"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; expected at most"),
        ({"num_hidden_layers": 60_000}, "describes a model of more than"),
        (
            {"attn_implementation": "attacker/kernel"},
            "has attn_implementation, which loads code or files",
        ),
        (
            {"rope_parameters": {"auto_map": {"AutoConfig": "own.Config"}}},
            "has auto_map, which loads code or files",
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "has quantization_config, which loads code",
        ),
    ],
)
def test_a_config_that_would_exhaust_or_open_this_machine_is_refused_at_once(
    llama: Path, change: dict[str, Any], text: str
) -> None:
    plan = plan_for(llama)
    section = plan.manifest.model
    hostile = json.dumps(json.loads(section.config or "{}") | change)
    changed = plan_run(plan.manifest.model_copy(update={"model": section.model_copy(update={"config": hostile})}))
    began = time.monotonic()
    with pytest.raises(ConfigError, match=re.escape(text)):
        build_run_model(changed, None, founds=False)
    assert time.monotonic() - began < 20.0


@pytest.mark.parametrize("values", [{}, {"weights": "loaded"}, {"weights": "loaded", "lora_rank": 2}])
def test_a_run_starts_from_an_export_and_then_needs_no_weights_of_its_source(
    llama: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    needs("peft")
    plan = plan_for(llama, **values)
    start = make_start(plan)
    states = {span: genesis_state(start_N, ZERO_DIGEST) for span, start_N in start.items()}
    (tmp_path / "export").mkdir()
    for name, content in files_of(learnt_model(plan, None, states, 3), ORIGIN).items():
        (tmp_path / "export" / name).write_bytes(content)
    assert genesis_digest(read_start(plan, tmp_path / "export")) == genesis_digest(start)
    section = plan.manifest.model.model_copy(update={"start": "ab" * 32})
    continued = plan_run(plan.manifest.model_copy(update={"model": section}))
    if not section.lora_rank:
        (llama / "model.safetensors").unlink()
    build_run_model(continued, None, founds=True)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"model_type": "bert", "is_decoder": False},
            'looks ahead: its first .* so it cannot be trained as a causal language model; set "is_decoder": true',
        ),
        ({"model_type": "t5"}, "t5 is an encoder-decoder and cannot be trained as a causal language model; name a"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"is quantised \(quantization_config in config.json\), and a run trains float32; name the model",
        ),
        (
            {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672},
            "parameters, which take 3.* GB, and .* GB of this machine's memory are free; choose a smaller model",
        ),
        ({"model_type": "no_such"}, "cannot read the model"),
        ({"model_type": "llama", "vocab_size": 100}, "the model has 100 tokens, the text 256; tokenise the text"),
    ],
)
def test_a_model_that_cannot_be_trained_here_is_refused_by_the_organiser(
    tmp_path: Path, config: dict[str, Any], text: str
) -> None:
    needs("transformers")
    (tmp_path / "config.json").write_text(json.dumps(SMALL | config))
    with pytest.raises(ConfigError, match=text):
        plan_for(tmp_path)


def test_weights_that_do_not_fit_or_are_not_finite_are_refused(llama: Path) -> None:
    safetensors = needs("safetensors.torch")
    path = llama / "model.safetensors"
    tensors = safetensors.load_file(path)
    norm = tensors.pop("model.norm.weight")
    safetensors.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"lack 1 tensors of the model, such as model.norm.weight; name weights of the"
    ):
        plan_for(llama, weights="loaded")
    safetensors.save_file({**tensors, "model.norm.weight": norm * float("nan")}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"parameter model.norm.weight of .* is not finite; load other weights"):
        plan_for(llama, weights="loaded")


def test_a_configuration_names_the_tokens_of_the_runs_tokenizer_and_any_may_be_trained(llama: Path) -> None:
    """Those of the source belong to another tokenizer; a padding token would get no gradient."""
    config = json.loads((llama / "config.json").read_text()) | {"pad_token_id": 97, "eos_token_id": [2, 3]}
    (llama / "config.json").write_text(json.dumps(config))
    plan = plan_for(llama)
    held = json.loads(plan.manifest.model.config or "")
    assert [held[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")] == [None, None, None]
    older = plan.manifest.model.model_copy(update={"config": json.dumps({**held, "pad_token_id": 97})})
    model = build_run_model(plan_run(plan.manifest.model_copy(update={"model": older})), None, founds=False)
    model.loss(model.module, torch.full((1, 5), 97)).backward()
    rows = model.module.get_input_embeddings().weight.grad
    assert rows[97].abs().sum() > 0


def test_an_infinity_in_a_configuration_survives_the_manifest(tmp_path: Path) -> None:
    needs("transformers")
    config = {"model_type": "mamba2", "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
    (tmp_path / "config.json").write_text(json.dumps(SMALL | config | {"time_step_limit": [0.0, float("inf")]}))
    plan = plan_for(tmp_path, context=16)
    model = build_run_model(plan, None, founds=False)
    assert model.module.config.time_step_limit[1] == float("inf")
