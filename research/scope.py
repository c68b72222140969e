"""Scale of an experiment: the size of the model, the islands, and the length and inner rate of a trial."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.config.inner_rule import OptimizerName, Schedule
from research.setting import OURS, Setting
from research.stages import JUDGED_TOKENS, Stage

RATES: dict[OptimizerName, dict[str, float]] = {
    "adamw": {"micro": 8e-3, "tiny": 4e-3, "small": 1e-3, "base": 4e-4},
    "muon": {"micro": 1.6e-2, "tiny": 8e-3, "small": 4e-3, "base": 4e-3},
}
"""Inner learning rates. Those of micro and tiny suit data-parallel and islands best. The rate of small with Muon is the
best of three for data-parallel and of two for islands (research/lab-log.md). Those of base, and of small with AdamW,
are not tuned."""
LONGEST_CYCLE = 32
"""Steps of the longest cycle of any row; trials are as long as whole ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Scale of an experiment.

    Attributes:
        size: size of the model.
        islands: number of learners.
        ticks: inner steps of an island.
        optimizer: inner optimiser of all rows.
        inner_rate: inner learning rate of all rows; None: tuned for the size and the optimiser.
        windows: windows per step of all islands together, so that more islands do not mean more tokens.
        speeds: for islands of mixed hardware, the windows that each trains on in a tick, relative to the planned ones.
        seeds: trials of each row; None: the experiment's default.
        is_quick: few seeds.
        stage: stage of evidence, see research/stages.py.
        inner_schedule: schedule of the inner rate of all rows.
    """

    size: str = "micro"
    islands: int = 4
    ticks: int = 480
    optimizer: OptimizerName = "muon"
    inner_rate: float | None = None
    windows: int = 32
    speeds: tuple[float, ...] = ()
    seeds: int | None = None
    is_quick: bool = False
    stage: Stage = "test"
    inner_schedule: Schedule = "cosine"

    def setting(self, name: str, system: str = OURS, *, sync_every: int = LONGEST_CYCLE) -> Setting:
        """Return a row with the outer step that `new` writes into a manifest."""
        return Setting(
            name=name,
            system=system,
            size=self.size,
            islands=self.islands,
            ticks=self.ticks,
            sync_every=sync_every,
            batch=max(1, self.windows // self.islands),
            inner=self.optimizer,
            learning_rate=self.rate_of(self.optimizer),
            outer_rate=0.7,
            momentum=0.3,
            mean="radial",
            stage=self.stage,
            judged_tokens=JUDGED_TOKENS[self.stage],
            inner_schedule=self.inner_schedule,
        )

    def rate_of(self, optimizer: OptimizerName) -> float:
        """Return the inner learning rate for an inner optimiser."""
        if self.inner_rate is not None:
            return self.inner_rate
        return RATES[optimizer][self.size]
