"""Train with transformers' Trainer, together with others.

python train.py run.toml state-a        found the run (written by new_run.py) and print its invite
python train.py "p2pdiloco://…" state-b join it, from here or from anywhere
"""

import sys
from typing import Any

from model import make_datasets, make_model, make_tokenizer
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from p2p_diloco.callbacks.transformers import SwarmCallback

run, folder = sys.argv[1:3]
member = SwarmCallback(run, settings={"state_directory": folder}, until_round=75)


class Show(TrainerCallback):
    """Print the invite at the begin, and the swarm with each log."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        print(f"others join with: {member.swarm.invite}", flush=True)

    def on_log(self, *_: Any, **__: Any) -> None:
        status = member.swarm.status
        print(f"round {status.round}, ready peers: {status.num_ready}, entries: {status.entries_absorbed}", flush=True)


arguments = TrainingArguments(
    output_dir=f"{folder}/trainer",
    max_steps=1_000_000,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    lr_scheduler_type="constant",
    logging_steps=50,
    eval_strategy="steps",
    eval_steps=200,
    save_steps=200,
    report_to="none",
    disable_tqdm=True,
)
tokenizer = make_tokenizer()
training, evaluation = make_datasets(tokenizer)
trainer = Trainer(
    make_model(),
    arguments,
    train_dataset=training,
    eval_dataset=evaluation,
    data_collator=default_data_collator,
    processing_class=tokenizer,
    callbacks=[member, Show()],
)
trainer.train()
trainer.save_model(f"{folder}/model")  # the shared model
print(f"finished with state {member.swarm.status.state_digest[:16]}, {trainer.evaluate()}")
