"""Comparison of a recorded run with one machine that trains on as many tokens with the batch of all islands."""

from __future__ import annotations

from pathlib import Path

from p2p_diloco.cli.figures_file import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.cli.replay import Replayed, play_again
from p2p_diloco.training.data import Corpus
from research.setting import Circumstances, Setting, run_trial


def compare_with_data_parallel(folders: tuple[Path, ...], *, data: str | None, json: str | None) -> int:
    """Replay a run, train data-parallel for comparison, print both, and return the exit code, 0.

    Args:
        folders: state directories of the peers of one run.
        data: this machine's copy of the run's text.
        json: file for the figures, `-` for standard output.
    """
    check_target(json)
    replayed = play_again(folders, data)
    loss = _data_parallel_loss(replayed)
    write_figures(json, replayed.figures() | {"data_parallel_loss": loss})
    if json != STANDARD_OUTPUT:
        against = 100 * (replayed.result.real_loss / loss - 1.0)
        print("\n".join([*replayed.lines(), f"data-parallel, as many tokens: {loss:.4f}; the swarm {against:+.2f} %"]))
    return 0


def _data_parallel_loss(replayed: Replayed) -> float:
    """Return the held-out loss of one machine after as many tokens as the run, with the run's inner optimiser."""
    plan, islands = replayed.recording.plan, len(replayed.recording.lives)
    setting = Setting(
        name="data-parallel",
        system="data-parallel",
        islands=islands,
        ticks=replayed.result.tokens // (islands * plan.inner.batch * plan.shape.context),
        batch=plan.inner.batch,
    )
    assert isinstance(replayed.corpus, Corpus), "replayed runs train the built-in model on bytes"
    within = Circumstances(shape=plan.shape, rule=plan.inner, corpus=replayed.corpus)
    return run_trial(setting, 0, within=within).loss
