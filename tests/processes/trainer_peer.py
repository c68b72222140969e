"""transformers' Trainer in a process of its own: `python trainer_peer.py ORDER.json`.

It writes lines of `said.jsonl` with the logged losses, and one when it ends.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from p2p_diloco.callbacks.transformers import SwarmCallback

LENGTH = 32


def make_model() -> transformers.LlamaForCausalLM:
    """Return a small Llama, untrained."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def make_texts(num: int) -> list[dict[str, list[int]]]:
    """Return sequences in which each token follows from the one before."""
    texts = []
    for first in range(num):
        tokens = [(first + (first % 5 + 1) * place) % 64 for place in range(LENGTH)]
        texts.append({"input_ids": tokens, "labels": tokens})
    return texts


class Say(transformers.TrainerCallback):
    """Writes what happens to a file; raises an error after it has written more than `fails_beyond` entries."""

    def __init__(self, folder: Path, swarm: SwarmCallback, fails_beyond: int | None) -> None:
        self._path = folder / "said.jsonl"
        self._swarm = swarm
        self._fails_beyond = fails_beyond
        self._entries = 0

    def say(self, **figures: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(figures) + "\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        status = self._swarm.swarm.status
        figures = {name: logs[name] for name in ("loss", "eval_loss") if name in logs}
        self._entries = status.entries_absorbed
        self.say(step=state.global_step, entries=self._entries, invite=self._swarm.swarm.invite, **figures)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(0.005)
        if self._fails_beyond is not None and self._entries > self._fails_beyond:
            raise RuntimeError("the caller's own error")


def main(order: dict[str, Any]) -> None:
    folder = Path(order["folder"])
    torch.set_num_threads(1)
    settings = {"state_directory": folder, "host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "no_port_mapping": True}
    swarm = SwarmCallback(
        order["run"] or order["invite"], settings=settings, timeout=60.0, until_round=order["until_round"]
    )
    say = Say(folder, swarm, order.get("fails_beyond"))
    trainer = transformers.Trainer(
        make_model(),
        transformers.TrainingArguments(
            output_dir=str(folder / "trainer"),
            max_steps=1_000_000,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=20,
            eval_strategy="steps",
            eval_steps=40,
            save_steps=40,
            save_total_limit=1,
            bf16=bool(order.get("autocast")),
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=make_texts(512),
        eval_dataset=make_texts(8),
        callbacks=[swarm, say],
    )
    trainer.train(resume_from_checkpoint=bool(order.get("resumes")))
    say.say(ended=True, digest=swarm.swarm.status.state_digest)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
