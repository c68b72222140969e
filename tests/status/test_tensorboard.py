"""Scalars for TensorBoard: one point per round under the usual names, without delaying the peer."""

from __future__ import annotations

import importlib.util
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from session_stage import Watcher

from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.status_file import ByteCounts, PeerStatus
from p2p_diloco.status.tensorboard import scalars_of, with_tensorboard

STATUS = PeerStatus(
    run="ab" * 32,
    round=7,
    updated=1_000.0,
    num_members=3,
    num_ready=2,
    inner_steps=50,
    tokens=6400,
    tokens_per_second=640.0,
    loss=2.5,
    anchor_loss=2.25,
    entries_absorbed=12,
    participation=0.75,
    bytes_sent=ByteCounts(vectors=100, control=20, transfer=3),
)
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard: make examples brings it"
)


def test_scalars_have_the_usual_names_and_unknown_ones_are_left_out() -> None:
    assert scalars_of(STATUS) == {
        "train/loss": 2.5,
        "train/tokens_per_second": 640.0,
        "train/tokens": 6400.0,
        "train/steps": 50.0,
        "eval/loss": 2.25,
        "swarm/members": 3.0,
        "swarm/ready": 2.0,
        "swarm/participation": 0.75,
        "swarm/entries": 12.0,
        "swarm/bytes_sent": 123.0,
        "swarm/bytes_received": 0.0,
    }


def test_how_far_the_run_is_has_a_scalar_if_an_end_is_planned() -> None:
    assert scalars_of(replace(STATUS, share_done=0.38))["swarm/share_done"] == 0.38


def test_a_bootstrap_peer_has_no_scalars_of_training() -> None:
    names = scalars_of(replace(STATUS, role="bootstrap", loss=None))
    assert not any(name.startswith("train/") for name in names)


def test_without_a_folder_the_observer_is_the_same() -> None:
    watcher = Watcher()
    with with_tensorboard(None, watcher) as observer:
        assert observer is watcher


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package tensorboard, which is not installed; install it with"):
        with_tensorboard(tmp_path, Watcher()).__enter__()


@needs_tensorboard
def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="name another folder with --tensorboard"):
        with_tensorboard(tmp_path / "file" / "runs", Watcher()).__enter__()


@needs_tensorboard
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_round_has_one_point_and_everything_is_passed_on(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watcher = Watcher()
    with with_tensorboard(tmp_path / "runs", watcher) as observer:
        observer.status(PeerStatus())  # before the run is known
        observer.status(STATUS)
        observer.status(replace(STATUS, loss=9.0))  # later in the same round
        observer.event(PeerEvent(time=1.0, topic="ready", text="ready"))
        observer.listening("p2pdiloco://", own_model=True)
    assert [status.loss for status in watcher.statuses] == [None, 2.5, 9.0]
    assert [event.topic for event in watcher.events] == ["ready"]
    found = EventAccumulator(str(tmp_path / "runs"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == set(scalars_of(STATUS))
    (point,) = found.Scalars("train/loss")
    assert (point.step, point.value, point.wall_time) == (7, 2.5, 1_000.0)


@needs_tensorboard
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_slow_disk_costs_points_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import tensorboard

    written, is_slow = [], threading.Event()

    class SlowWriter:
        def __init__(self, *_: Any, **__: Any) -> None:
            assert is_slow.wait(60.0)

        def add_scalar(self, name: str, value: float, *, global_step: int, walltime: float) -> None:
            written.append(global_step)

        def close(self) -> None:
            pass

    monkeypatch.setattr(tensorboard, "SummaryWriter", SlowWriter)
    watcher = Watcher()
    with with_tensorboard(tmp_path, watcher) as observer:
        for number in range(20):
            observer.status(replace(STATUS, round=number))
        assert len(watcher.statuses) == 20
        is_slow.set()
    assert set(written) == {0}


@needs_tensorboard
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_writer_that_fails_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils import tensorboard

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(tensorboard, "SummaryWriter", fail)
    watcher = Watcher()
    with caplog.at_level(logging.WARNING, "p2p_diloco"), with_tensorboard(tmp_path, watcher) as observer:
        for number in range(5):
            observer.status(replace(STATUS, round=number))
    assert len(watcher.statuses) == 5
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot write scalars to {tmp_path}: no space left; the peer continues without them"
    ]
