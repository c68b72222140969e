"""A rank of an island other than 0, in the built-in training: it has no peer, and trains what rank 0 orders."""

from __future__ import annotations

import json

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.peer.built_in import KEPT, RankOrder, build_steps
from p2p_diloco.peer.island import THE_END, TURN, Island
from p2p_diloco.peer.run_model import build_run_model
from p2p_diloco.peer.run_plan import plan_run
from p2p_diloco.peer.training_thread import Steps
from p2p_diloco.training.parameters import trained
from p2p_diloco.training.rank_steps import RankBatches, RankSteps


class KnownError(P2PDilocoError):
    """An error that rank 0 knows and reports."""


def follow_rank_0(island: Island, settings: PeerSettings) -> None:
    """Train with rank 0, session after session, until it has left.

    Raises:
        KnownError: the model cannot be trained on one of the ranks.
        P2PDilocoError: this rank cannot go on, or another is missing.
    """
    while (order := island.await_training()) is not None:
        try:
            steps = island.build(lambda: _build(island, RankOrder(**json.loads(order)), settings))
        except P2PDilocoError as error:
            raise KnownError(str(error)) from error
        while (progress := island.call(TURN, lambda reports: None)) != THE_END and not island.is_over:
            if progress is not None:
                steps.loop.set_progress(progress)
                with island.exchanging():
                    steps.make()


def _build(island: Island, order: RankOrder, settings: PeerSettings) -> Steps:
    plan = plan_run(RunManifest.model_validate_json(order.manifest))
    model = build_run_model(plan, settings.model, founds=order.founds)
    stream = RankBatches(island.ranks, None, batch=plan.inner.batch, context=plan.context)
    ranks = RankSteps(island.ranks, has_shards=order.has_shards, uses_all=plan.built_in is not None)
    steps = build_steps(plan, settings, model, stream, ranks=ranks)
    island.attach(model.module, trained(model.module), {KEPT: steps.loop}, settings.state_directory)
    return steps
