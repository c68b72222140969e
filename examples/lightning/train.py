"""Train with Lightning, together with others.

python train.py run.toml state-a        found the run (written by new_run.py) and print its invite
python train.py "p2pdiloco://…" state-b join it, from here or from anywhere
"""

import sys

import lightning
from model import Adder, make_loader

from p2p_diloco.callbacks.lightning import SwarmCallback

run, folder = sys.argv[1:3]
member = SwarmCallback(run, settings={"state_directory": folder}, tokens=lambda batch: len(batch[0]), until_round=75)


class Show(lightning.Callback):
    """Print the invite at the begin, and the swarm after each validation."""

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        print(f"others join with: {member.swarm.invite}", flush=True)

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        status, loss = member.swarm.status, trainer.callback_metrics["val_loss"]
        print(f"round {status.round}, loss of the shared model {loss:.4f}, ready peers: {status.num_ready}", flush=True)


trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=-1,
    val_check_interval=500,
    num_sanity_val_steps=0,
    default_root_dir=folder,
    logger=False,
    enable_progress_bar=False,
    callbacks=[member, Show()],
)
trainer.fit(Adder(), make_loader(num_sums=64_000), make_loader(num_sums=1024, seed=0))
trainer.save_checkpoint(f"{folder}/model.ckpt")  # the shared model
print(f"finished with state {member.swarm.status.state_digest[:16]}")
