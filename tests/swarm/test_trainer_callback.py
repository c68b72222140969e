"""transformers' Trainer in a run, on an in-memory network. Skipped without transformers: `make examples` brings it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import p2p_diloco
from p2p_diloco.testing import local_swarm

transformers = pytest.importorskip("transformers", reason="needs transformers: make examples brings it")
pytest.importorskip("accelerate", reason="needs accelerate: make examples brings it")

from p2p_diloco.callbacks.transformers import SwarmCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

UNTIL_ROUND = 24
LENGTH, BATCH = 16, 4
FIRST_ROUND = 2 / 4000
"""Progress after the entries of the first round: two of four spans, in one of a thousand cycles."""


def make_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **changes))


def make_texts(num: int = 256, padded: int = 0) -> list[dict[str, list[int]]]:
    """Return sequences in which each token follows from the one before, so that a model can learn them."""
    texts = []
    for first in range(num):
        tokens = [(first + 3 * place) % 32 for place in range(LENGTH)]
        mask = [1] * (LENGTH - padded) + [0] * padded
        labels = [token if seen else -100 for token, seen in zip(tokens, mask, strict=True)]
        texts.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return texts


def make_trainer(
    folder: Path, *callbacks: Any, model: Any = None, texts: Any = None, processing_class: Any = None, **changes: Any
) -> Any:
    words = {
        "output_dir": str(folder),
        "max_steps": 100_000,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.Trainer(
        model if model is not None else make_model(),
        transformers.TrainingArguments(**{**words, **changes}),
        train_dataset=texts if texts is not None else make_texts(),
        eval_dataset=make_texts(8),
        data_collator=transformers.default_data_collator,
        processing_class=processing_class,
        callbacks=list(callbacks),
    )


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Calls a function at an event."""

    def __init__(self, **calls: Callable[[Any, dict[str, Any]], object]) -> None:
        for event, call in calls.items():
            setattr(self, event, partial(self._call, call))

    def _call(self, call: Callable[..., object], args: Any, state: Any, control: Any, **others: Any) -> None:
        call(state, others)  # what it returns would replace the control


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def parameters(model: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_two_trainers_learn_together_stop_with_the_run_and_hold_the_same_model(tmp_path: Path) -> None:
    with local_swarm() as local:
        founder = make_trainer(tmp_path / "ada", SwarmCallback(local.found, until_round=UNTIL_ROUND))
        joiner_swarm = SwarmCallback(local.join, until_round=UNTIL_ROUND)
        joiner = make_trainer(tmp_path / "ben", joiner_swarm)
        founder_swarm = founder.callback_handler.callbacks[-2]
        began = threading.Event()
        founder.add_callback(Watch(on_step_end=lambda *_: began.set()))
        thread = threading.Thread(target=founder.train)
        thread.start()
        assert began.wait(60.0)
        joiner.train()
        thread.join()
    assert founder_swarm.swarm.status.state_digest == joiner_swarm.swarm.status.state_digest != ""
    assert joiner_swarm.swarm.status.entries_absorbed > 0
    assert equal(parameters(founder.model), parameters(joiner.model))
    assert losses(joiner)[-1] < 0.5 * losses(founder)[0]
    assert 0 < joiner.state.global_step < joiner.state.max_steps


def train_alone(folder: Path, *watching: Any, **words: Any) -> tuple[SwarmCallback, Any]:
    """Train as the only peer of a run; return the callback and the Trainer."""
    with local_swarm() as local:
        callback = SwarmCallback(local.found)
        trainer = make_trainer(folder, callback, *watching, **words)
        trainer.train()
    return callback, trainer


def make_tokenizer() -> Any:
    """Return a tokenizer that knows what padding is."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 31}, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")


@pytest.mark.parametrize(
    ("words", "counted"),
    [
        ({}, LENGTH),
        ({"include_num_input_tokens_seen": "non_padding"}, LENGTH - 4),
        ({"processing_class": make_tokenizer}, LENGTH - 4),
    ],
)
def test_a_step_counts_the_tokens_of_all_its_batches(
    tmp_path: Path, words: dict[str, Any], counted: int, caplog: pytest.LogCaptureFixture
) -> None:
    words = {name: value() if callable(value) else value for name, value in words.items()}
    callback, _ = train_alone(tmp_path, texts=make_texts(padded=4), max_steps=5, gradient_accumulation_steps=3, **words)
    assert (callback.swarm.status.inner_steps, callback.swarm.status.tokens) == (5, 5 * 3 * BATCH * counted)
    assert callback.swarm.status.loss is not None, "the logged loss is published"
    assert "non-padding" not in caplog.text, "no warning for each batch"


def test_after_resuming_from_a_checkpoint_only_new_tokens_count(tmp_path: Path) -> None:
    train_alone(tmp_path, max_steps=4, save_strategy="steps", save_steps=4)
    with local_swarm() as local:
        callback = SwarmCallback(local.found)
        trainer = make_trainer(tmp_path, callback, max_steps=7)
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 7
    assert (callback.swarm.status.inner_steps, callback.swarm.status.tokens) == (3, 3 * BATCH * LENGTH)


@pytest.mark.parametrize("shared", [True, False])
def test_evaluations_and_checkpoints_are_of_the_shared_model_and_steps_of_the_own(tmp_path: Path, shared: bool) -> None:
    evaluated: list[list[torch.Tensor]] = []
    own: list[torch.Tensor] = []
    anchor: list[torch.Tensor] = []

    def step_ended(state: Any, others: dict[str, Any]) -> None:
        if callback.swarm.progress < FIRST_ROUND:
            time.sleep(0.03)  # until the entries of the first round are there; the next ones come a minute later

    def step_begins(state: Any, others: dict[str, Any]) -> None:
        if state.global_step == 100:
            own.extend(parameters(others["model"]))
            with callback.swarm.anchor():
                anchor.extend(parameters(others["model"]))

    with local_swarm(rounds={"round_seconds": 60.0}) as local:
        callback = SwarmCallback(local.found, shared=shared)
        watch = Watch(
            on_step_end=step_ended,
            on_step_begin=step_begins,
            on_prediction_step=lambda state, others: evaluated.append(parameters(others["model"])),
        )
        trainer = make_trainer(
            tmp_path,
            callback,
            watch,
            max_steps=101,
            eval_strategy="steps",
            eval_steps=100,
            save_strategy="steps",
            save_steps=100,
        )
        trainer.train()
        assert callback.swarm.progress >= FIRST_ROUND
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-100", dtype=torch.float32)
    assert not equal(own, anchor)
    assert equal(evaluated[0], anchor if shared else own)
    assert equal(parameters(saved), anchor if shared else own)
    assert equal(parameters(trainer.model), anchor) is shared, "after training"


def test_a_model_in_bfloat16_is_refused_with_the_arguments_of_transformers(tmp_path: Path) -> None:
    with pytest.raises(p2p_diloco.ConfigError) as refused:
        train_alone(tmp_path, model=make_model().to(torch.bfloat16), max_steps=1)
    assert str(refused.value) == (
        "parameter model.embed_tokens.weight is bfloat16; trained parameters must be float32, because an update of "
        "1e-5 does not change a bfloat16 of 0.03; load the model with dtype=torch.float32, and for speed set bf16=True "
        "in TrainingArguments"
    )


def test_mixed_precision_trains(tmp_path: Path) -> None:
    callback, trainer = train_alone(tmp_path, max_steps=20, bf16=True)
    assert callback.swarm.status.inner_steps == 20
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_trainers_with_the_same_arguments_draw_different_batches_unless_data_seed_is_set(tmp_path: Path) -> None:
    first: dict[str, list[list[int]]] = {}

    def batch_of(name: str, **words: Any) -> list[list[int]]:
        model = make_model()
        model.register_forward_pre_hook(
            lambda module, given, keywords: first.setdefault(name, keywords["input_ids"].tolist()) and None,
            with_kwargs=True,
        )
        train_alone(tmp_path / name, model=model, max_steps=1, **words)
        return first[name]

    assert batch_of("ada") != batch_of("ben")
    assert batch_of("cleo", data_seed=7) == batch_of("dora", data_seed=7)


def test_after_an_exception_a_peer_leaves_with_the_block_or_with_the_next_training(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the caller's own error")

    model = make_model()
    with local_swarm() as local:
        with pytest.raises(RuntimeError, match="own error"), SwarmCallback(local.found) as callback:
            make_trainer(tmp_path, callback, Watch(on_step_end=fail), model=model).train()
        assert callback.swarm.status.phase == "finished"
    with local_swarm() as local:
        callback = SwarmCallback(local.found)
        with pytest.raises(RuntimeError, match="own error"):
            make_trainer(tmp_path, callback, Watch(on_step_end=fail), model=model).train()
        broken_off = callback.swarm
        with pytest.raises(p2p_diloco.ConfigError, match=r"run\.toml"):  # it is founded already
            make_trainer(tmp_path, callback, model=model, max_steps=1).train()
        assert broken_off.status.phase == "finished"


def test_the_best_checkpoint_stays_loaded_at_the_end(tmp_path: Path) -> None:
    _, trainer = train_alone(
        tmp_path, max_steps=6, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    best = transformers.LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint, dtype=torch.float32)
    assert equal(parameters(trainer.model), parameters(best))


def test_a_model_without_counted_tokens_is_refused(tmp_path: Path) -> None:
    model = make_model()
    model.main_input_name = "pixels"
    with pytest.raises(p2p_diloco.ConfigError, match="main_input_name"):
        train_alone(tmp_path, model=model, max_steps=1)


def test_only_the_adapters_of_peft_are_exchanged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft: make examples brings it")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model(), config)
    callback, _ = train_alone(tmp_path, model=model, max_steps=3)
    status = callback.swarm.status
    assert (status.inner_steps, status.parameters) == (3, sum(tensor.numel() for tensor in parameters(model)))


def test_what_is_neither_an_invite_nor_a_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(p2p_diloco.ConfigError, match=r"neither an invite \(p2pdiloco://…\) nor a run file; to begin"):
        SwarmCallback(tmp_path / "run.toml")
    with pytest.raises(p2p_diloco.ConfigError, match="run id has 8 characters"):
        SwarmCallback("p2pdiloco://nonsense")
    with local_swarm() as local, pytest.raises(p2p_diloco.ConfigError, match="settings and timeout have no effect"):
        SwarmCallback(local.found, timeout=3.0)
    with pytest.raises(p2p_diloco.StateError, match="no swarm before the training begins"):
        _ = SwarmCallback(lambda *_: None).swarm


def test_a_step_that_breaks_the_model_is_undone_and_the_trainer_goes_on(tmp_path: Path) -> None:
    def spoil(state: Any, others: dict[str, Any]) -> None:
        if state.global_step == 20:
            with torch.no_grad():
                others["model"].lm_head.weight[0, 0] = float("nan")

    with local_swarm() as local:
        callback = SwarmCallback(local.found)
        spoiler = Watch(on_step_begin=spoil)
        trainer = make_trainer(tmp_path, spoiler, callback, max_steps=60)
        trainer.train()
    assert callback.swarm.status.steps_undone == 1
    assert callback.swarm.status.inner_steps == 59
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert losses(trainer)[-1] < losses(trainer)[0]
