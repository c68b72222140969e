"""The built-in training on a machine: what it refuses before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from small_run import small_corpus, small_plan, stream_of

from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.models.text_model import decoder_text_model
from p2p_diloco.app.training.built_in import BuiltInTraining, build_steps
from p2p_diloco.app.training.micro_batch import Recompute
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId
from p2p_diloco.island.island import Island


def test_several_ranks_keep_no_trace() -> None:
    island = cast(Island, object())
    with pytest.raises(ConfigError, match="several ranks; leave out --keep-trace, or train with --ranks 1"):
        BuiltInTraining(island=island).check(PeerSettings(keep_trace=True), None)
    BuiltInTraining(island=island).check(PeerSettings(), None)
    BuiltInTraining().check(PeerSettings(keep_trace=True), None)


@pytest.mark.parametrize(("recompute", "at_once", "at_need"), [("auto", False, True), ("always", True, False)])
def test_the_setting_decides_whether_activations_are_recomputed(
    tmp_path: Path, recompute: Recompute, at_once: bool, at_need: bool
) -> None:
    plan = small_plan()
    stream = stream_of(plan, small_corpus(tmp_path), PeerId(bytes(32)))
    model = decoder_text_model(build_model(plan.shape, 0))
    loop = build_steps(plan, PeerSettings(device="cpu", recompute=recompute), model, stream).loop
    assert loop.recomputes is at_once
    assert loop.start_recomputing() is at_need
