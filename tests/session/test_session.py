"""A peer from its manifest to its checkpoint; everything is real except the network, the clock and the thread."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import session_stage
import torch
from session_stage import LoopTraining, SessionStage, Watcher, run_stage
from small_run import CLOCK_START, EveryThird, peer_key

from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.app.text.data import BatchStream
from p2p_diloco.app.training import built_in
from p2p_diloco.app.training.built_in import LAST_STEP_SECONDS
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.errors import ConfigError, NetworkError, StateError
from p2p_diloco.ids import SpanId, format_peer_id
from p2p_diloco.island.inner_state import INNER_FILE
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.session.peer_plan import Clocks
from p2p_diloco.span import known_answer
from p2p_diloco.storage import checkpoint
from p2p_diloco.storage.run_folder import RunFolder

Patch = pytest.MonkeyPatch


async def play_all(stage: SessionStage, until_round: int, *names: str, **choices: Any) -> dict[str, Watcher]:
    """Run a bootstrap peer and volunteers to the end of a round, and return their observers."""
    watchers = {name: Watcher() for name in ("boot", *names)}
    async with asyncio.TaskGroup() as tasks:
        boot = {"founds": True, "trains": False, "until_round": until_round}
        tasks.create_task(stage.play("boot", watchers["boot"], StopRequest(), **boot))
        for name in names:
            tasks.create_task(
                stage.play(name, watchers[name], StopRequest(), until_round=until_round, **choices), name=name
            )
    return watchers


async def test_all_end_after_one_round_with_the_same_bytes(tmp_path: Path) -> None:
    stage = SessionStage(tmp_path)
    watchers = await play_all(stage, 6, "ada", "ben", "cleo")
    finals = {name: watchers[name].last for name in ("ada", "ben", "cleo")}
    assert len({status.state_digest for status in finals.values()}) == 1
    for name, status in finals.items():
        assert len(status.state_digest) == 64
        assert (status.phase, status.role, status.incarnation) == ("finished", "trainer", 1)
        assert status.peer == format_peer_id(peer_key(name).peer)
        assert status.participation is not None
        assert 0.0 < status.participation <= 1.0
        last = next(event for event in reversed(watchers[name].events) if event.topic == "round")
        assert last.figures["num_included"] == 3 * int(last.figures["num_spans"])
        assert status.inner_steps > 0
        assert list(stage.run_folder(name).path.glob("checkpoint-*"))
    assert stage.now() < stage.begin(7) + 15
    assert watchers["boot"].last.role == "bootstrap"
    assert watchers["boot"].last.state_digest == ""


@pytest.mark.slow
async def test_a_bootstrap_peer_reduces_for_peers_that_cannot_be_dialled(tmp_path: Path) -> None:
    stage = SessionStage(tmp_path)
    late = Watcher()

    async def join_late() -> None:
        await stage.sleep_to(8)
        await stage.play("cleo", late, StopRequest(), until_round=20, can_be_dialled=False)

    joining = asyncio.ensure_future(join_late())
    watchers = await play_all(stage, 20, "ada", "ben", can_be_dialled=False)
    await joining
    finals = [watchers["ada"].last, watchers["ben"].last, late.last]
    assert len({status.state_digest for status in finals}) == 1
    assert finals[0].state_digest != ""
    assert watchers["boot"].last.log_digest == finals[0].log_digest, "it follows the entries that it makes"
    last = next(event for event in reversed(late.events) if event.topic == "round")
    assert last.figures["num_included"] == 3 * int(last.figures["num_spans"])


async def test_a_founder_reports_it_once_and_follows_while_it_is_needed(tmp_path: Path) -> None:
    watchers = await play_all(SessionStage(tmp_path), 4, "ada", "ben")
    assert watchers["boot"].texts("founded") == ['founded "small"']
    assert watchers["ada"].texts("founded") == []
    assert watchers["boot"].last.log_digest == watchers["ada"].last.log_digest != "", (
        "it reduces, because few others do yet"
    )
    phases = dict.fromkeys(status.phase for status in watchers["ada"].statuses)
    assert list(phases) == ["catching up", "training", "finished"]


async def test_a_founder_that_trains_continues_alone(tmp_path: Path) -> None:
    watcher = Watcher()
    await SessionStage(tmp_path).play("ada", watcher, StopRequest(), founds=True, until_round=5)
    assert watcher.last.entries_absorbed == watcher.last.spans_closed > 0
    assert watcher.last.num_members == 1


@pytest.mark.parametrize(
    ("planned_steps", "batch", "limits"), [(8, "auto", (1, 4)), (8, "planned", (2, 2)), (None, "auto", (2, 2))]
)
async def test_the_batch_changes_only_in_a_run_that_plans_steps_and_unless_its_owner_forbids_it(
    tmp_path: Path, monkeypatch: Patch, planned_steps: int | None, batch: Any, limits: tuple[int, int]
) -> None:
    monkeypatch.setattr(built_in, "BatchChoice", EveryThird)
    watcher = Watcher()
    stage = SessionStage(tmp_path, **{"rounds.planned_steps": planned_steps})
    await stage.play("ada", watcher, StopRequest(), founds=True, until_round=5, batch=batch)
    last = watcher.last
    assert (last.planned_windows, last.fewest_windows, last.most_windows) == (2, *limits)
    changes = limits != (2, 2)
    assert bool(watcher.texts("batch")) == changes
    assert {status.step_windows for status in watcher.statuses if status.inner_steps} >= ({1, 2, 4} if changes else {2})
    assert (last.tokens != 24 * last.inner_steps) == changes


async def test_a_leaving_peer_finishes_the_round_and_resumes_after_a_restart(tmp_path: Path) -> None:
    stage = SessionStage(tmp_path)
    watchers = {name: Watcher() for name in ("boot", "ada", "ben", "ben again")}
    stops = {name: StopRequest() for name in watchers}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.play("boot", watchers["boot"], stops["boot"], founds=True, trains=False))
        tasks.create_task(stage.play("ada", watchers["ada"], stops["ada"], until_round=16))
        ben = tasks.create_task(stage.play("ben", watchers["ben"], stops["ben"]))
        await stage.sleep_to(6, seconds=3.0)
        stops["ben"].leave()
        await ben
        assert abs(stage.now() - stage.begin(7)) < 1.5
        assert len(watchers["ben"].last.state_digest) == 64
        steps = steps_of_optimiser(stage.run_folder("ben"))
        assert steps == watchers["ben"].last.inner_steps > 0
        await stage.sleep_to(9)
        tasks.create_task(stage.play("ben", watchers["ben again"], stops["ben again"], until_round=16))
        await stage.sleep_to(17)
        stops["boot"].leave()
    again = watchers["ben again"].last
    assert again.incarnation == 2
    assert again.state_digest == watchers["ada"].last.state_digest != ""
    assert again.bytes_received.transfer < 8 * again.parameters, "fetched all of it again"
    assert any("good" in event.topic for event in watchers["ada"].events)
    assert steps_of_optimiser(stage.run_folder("ben")) == steps + again.inner_steps, "the optimiser was reset"


def steps_of_optimiser(folder: RunFolder) -> int:
    """Return the number of steps of a peer's saved optimiser."""
    kept = torch.load(folder.path / INNER_FILE, weights_only=True)
    return int(kept["parts"]["the optimiser"]["state"]["optimizer_steps"])


async def test_a_second_ctrl_c_does_not_wait_for_the_round(tmp_path: Path) -> None:
    stage, watcher, stop = SessionStage(tmp_path), Watcher(), StopRequest()
    task = asyncio.ensure_future(stage.play("ada", watcher, stop, founds=True))
    await stage.sleep_to(3, seconds=1.0)
    stop.leave()
    await asyncio.sleep(1.0)
    assert not task.done()
    stop.stop_now()
    await task
    assert stage.now() < stage.begin(3) + 3.0
    assert watcher.last.phase == "leaving"


async def test_a_restart_uses_the_checkpoint_and_founds_nothing_again(tmp_path: Path) -> None:
    stage, first, second = SessionStage(tmp_path), Watcher(), Watcher()
    await stage.play("ada", first, StopRequest(), founds=True, until_round=4)
    await stage.play("ada", second, StopRequest(), founds=True, until_round=12)
    assert second.texts("founded") == []
    assert second.last.incarnation == 2
    assert second.last.state_digest not in ("", first.last.state_digest)
    assert second.last.entries_absorbed > 0


async def test_a_founder_that_has_lost_its_state_does_not_go_on_with_another_model(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    stage, watcher = SessionStage(tmp_path), Watcher()
    await stage.play("boot", watcher, StopRequest(), founds=True, trains=False, until_round=1)
    for path in stage.run_folder("boot").path.glob("checkpoint-*"):
        path.unlink()
    await stage.play("boot", Watcher(), StopRequest(), founds=True, trains=False, until_round=3)

    def other(plan: RunPlan, own: str | None) -> dict[SpanId, Vector]:
        return {span: anchor_N + 1.0 for span, anchor_N in make_start(plan, own).items()}

    for path in stage.run_folder("boot").path.glob("checkpoint-*"):
        path.unlink()
    monkeypatch.setattr(session_stage, "make_start", other)
    with pytest.raises(StateError, match="not the one that the run was founded with; restore a checkpoint"):
        await stage.play("boot", Watcher(), StopRequest(), founds=True, trains=False, until_round=5)


async def test_each_start_trains_on_its_own_windows(tmp_path: Path, monkeypatch: Patch) -> None:
    positions: list[int] = []
    made = BatchStream.__init__

    def note(self: BatchStream, *arguments: Any, **choices: Any) -> None:
        made(self, *arguments, **choices)
        positions.append(self.position)

    monkeypatch.setattr(BatchStream, "__init__", note)
    stage = SessionStage(tmp_path)
    for until_round in (1, 2):
        await stage.play("ada", Watcher(), StopRequest(), founds=True, until_round=until_round)
    assert positions[0] == 0
    assert positions[1] - positions[0] >= 1 << 32


async def test_held_out_losses_are_measured_and_reported(tmp_path: Path) -> None:
    watchers = await play_all(SessionStage(tmp_path), 8, "ada", evaluate_seconds=10.0)
    evaluations = [event for event in watchers["ada"].events if event.topic == "evaluation"]
    assert len(evaluations) > 2
    assert set(evaluations[-1].figures) == {"anchor_loss", "local_loss", "round", "tokens"}
    assert evaluations[-1].figures["anchor_loss"] < evaluations[0].figures["anchor_loss"]  # type: ignore[operator]
    assert watchers["ada"].last.anchor_loss == evaluations[-1].figures["anchor_loss"]


async def test_a_full_disk_costs_only_the_checkpoint(tmp_path: Path, monkeypatch: Patch) -> None:
    def fill_the_disk(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", fill_the_disk)
    watcher = Watcher()
    await SessionStage(tmp_path).play("ada", watcher, StopRequest(), founds=True, until_round=3)
    assert "No space left on device" in watcher.texts("checkpoint")[0]
    assert watcher.last.phase == "finished"


@pytest.mark.parametrize("what", ["keep_ballots", "keep_roster"])
async def test_a_peer_that_cannot_save_its_votes_or_rosters_ends(tmp_path: Path, monkeypatch: Patch, what: str) -> None:
    keep = getattr(RunFolder, what)

    def refuse(folder: RunFolder, *kept: Any) -> None:
        if tmp_path / "ada" in folder.path.parents:
            raise StateError("cannot write: No space left on device; free some space")
        keep(folder, *kept)

    stage = SessionStage(tmp_path)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    ada = asyncio.ensure_future(stage.play("ada", Watcher(), StopRequest(), founds=True))
    await stage.sleep_to(3)
    assert not ada.done()
    monkeypatch.setattr(RunFolder, what, refuse)
    ben = asyncio.ensure_future(stage.play("ben", Watcher(), StopRequest()))  # a change makes a roster
    await asyncio.wait({ada}, timeout=60.0)
    assert ada.done()
    with pytest.raises(StateError, match="free some space"):
        await ada
    ben.cancel()
    await asyncio.wait({ben})


@pytest.mark.slow
async def test_checkpoints_are_written_at_intervals(tmp_path: Path) -> None:
    stage, stop = SessionStage(tmp_path), StopRequest()
    task = asyncio.ensure_future(stage.play("ada", Watcher(), stop, founds=True))
    folder = stage.run_folder("ada").path
    await stage.sleep_to(4)
    assert len(list(folder.glob("checkpoint-*"))) == 1, "one at the start"
    await asyncio.sleep(310.0)
    assert len(list(folder.glob("checkpoint-*"))) == 3
    stop.stop_now()
    await task


async def test_a_run_founded_ahead_keeps_its_own_time_after_the_clock_was_corrected(tmp_path: Path) -> None:
    stage, stop = SessionStage(tmp_path), StopRequest()
    loop, wall = asyncio.get_running_loop(), SimpleNamespace(ahead=600.0)

    def clocks() -> Clocks:
        return Clocks(steady=lambda begin=wall.ahead: loop.time() + begin, wall=lambda: loop.time() + wall.ahead)

    task = asyncio.ensure_future(stage.play("ada", Watcher(), stop, founds=True, clocks=clocks()))
    await asyncio.sleep(60.0)
    wall.ahead = 0.0
    await asyncio.sleep(15.0)
    stop.stop_now()
    await task
    assert abs(stage.run_folder("ada").recall_clock_offset() - 600.0) < 0.1
    again = Watcher()
    begin, stop = loop.time(), StopRequest()
    task = asyncio.ensure_future(stage.play("ada", again, stop, founds=True, clocks=clocks()))
    await asyncio.sleep(60.0)
    stop.stop_now()
    await task
    rounds = [status.round for status in again.statuses]
    seconds = stage.manifest.rounds.round_seconds
    assert min(rounds) >= (begin + 599.0 - CLOCK_START) // seconds
    assert max(rounds) <= (begin + 665.0 - CLOCK_START) // seconds
    assert again.last.entries_absorbed > 0


async def test_addresses_that_cannot_be_saved_are_not_fatal(tmp_path: Path, monkeypatch: Patch) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise StateError("cannot write peers.json: Read-only file system")

    monkeypatch.setattr("p2p_diloco.storage.run_folder.RunFolder.keep_addresses", refuse)
    watchers = await play_all(SessionStage(tmp_path), 3, "ada")
    assert any("Read-only" in text for text in watchers["ada"].texts("addresses"))


async def test_a_broken_checkpoint_is_set_aside_and_the_older_one_is_used(tmp_path: Path) -> None:
    stage, first, again = SessionStage(tmp_path), Watcher(), Watcher()
    await stage.play("ada", first, StopRequest(), founds=True, until_round=6)
    folder = stage.run_folder("ada").path
    checkpoints = sorted(folder.glob("checkpoint-*"))
    assert len(checkpoints) > 1
    checkpoints[-1].write_bytes(b"torn")
    await stage.play("ada", again, StopRequest(), founds=True, until_round=6)
    assert "is broken" in again.texts("checkpoint")[0]
    assert "replayed" in again.texts("replay")[0]
    assert again.texts("founded") == []
    assert again.last.state_digest == first.last.state_digest != ""
    assert (folder / f"refused-{checkpoints[-1].name}").read_bytes() == b"torn"


async def test_the_last_step_is_waited_for_but_not_forever(tmp_path: Path, monkeypatch: Patch) -> None:
    calls: list[str | float] = []
    end = LoopTraining.stop

    def stop(island: LoopTraining) -> None:
        calls.append("stop")
        end(island)

    def join(island: LoopTraining, timeout_seconds: float) -> bool:
        calls.append(timeout_seconds)
        return False

    monkeypatch.setattr(LoopTraining, "stop", stop)
    monkeypatch.setattr(LoopTraining, "join", join)
    await SessionStage(tmp_path).play("ada", Watcher(), StopRequest(), founds=True, until_round=4)
    assert calls == ["stop", LAST_STEP_SECONDS]


async def test_an_unreadable_checkpoint_ends_the_peer_before_it_starts_again(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    stage = SessionStage(tmp_path)
    await stage.play("ada", Watcher(), StopRequest(), founds=True, until_round=6)
    kept = {path: path.read_bytes() for path in stage.run_folder("ada").path.glob("*checkpoint-*")}
    monkeypatch.setattr(checkpoint, "safe_open", fail)
    with pytest.raises(StateError, match="it was not changed"):
        await stage.play("ada", Watcher(), StopRequest(), until_round=9)
    assert {path: path.read_bytes() for path in stage.run_folder("ada").path.glob("*checkpoint-*")} == kept != {}


def test_killing_all_peers_at_once_loses_no_entry_on_disk(tmp_path: Path, monkeypatch: Patch) -> None:
    """Their checkpoints are of different ages, and one peer has lost its entries as well."""

    async def live(stage: SessionStage, names: list[str], until: float) -> dict[str, Watcher]:
        watchers = {name: Watcher() for name in names}
        plays = [stage.play(name, watchers[name], StopRequest(), founds=name == "ada") for name in names]
        tasks = list(map(asyncio.ensure_future, plays))
        await asyncio.sleep(until - stage.now())
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return watchers

    async def scene() -> None:
        stage, names = SessionStage(tmp_path), ["ada", "ben", "cleo"]
        before = await live(stage, names, stage.begin(9) - 0.5)
        for name in ("ada", "ben"):
            for late in sorted(stage.run_folder(name).path.glob("checkpoint-*"))[1:]:
                late.unlink()
        shutil.rmtree(stage.run_folder("cleo").path / "entries")
        heads = {before[name].last.log_digest for name in names}
        assert len(heads) == 1
        again = await live(stage, names, stage.begin(10) - 0.1)
        first_heads = {next(s.log_digest for s in again[name].statuses if s.ready) for name in names}
        assert first_heads == heads, "they resume where they were killed"

    run_stage(monkeypatch, scene)


async def test_training_that_fails_ends_the_peer_with_its_error(tmp_path: Path, monkeypatch: Patch) -> None:
    def fail(self: BatchStream) -> NoReturn:
        raise OSError("the disk is gone")

    monkeypatch.setattr(BatchStream, "next_batch", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        await SessionStage(tmp_path).play("ada", Watcher(), StopRequest(), founds=True)


async def test_a_transport_that_dies_ends_the_peer_with_its_error(tmp_path: Path) -> None:
    stage = SessionStage(tmp_path)
    task = asyncio.ensure_future(stage.play("ada", Watcher(), StopRequest(), founds=True))
    await stage.sleep_to(2)
    transport = stage.network.find(peer_key("ada").peer)
    assert transport is not None
    transport.listener.transport_lost(NetworkError("the libp2p daemon died"))
    with pytest.raises(NetworkError, match="the libp2p daemon died"):
        await task


async def test_a_transport_that_dies_while_a_peer_leaves_does_not_keep_it_from_saving(tmp_path: Path) -> None:
    stage, watcher, stop = SessionStage(tmp_path), Watcher(), StopRequest()
    task = asyncio.ensure_future(stage.play("ada", watcher, stop, founds=True))
    await stage.sleep_to(6, seconds=1.0)
    stop.leave()
    await asyncio.sleep(0.5)
    transport = stage.network.find(peer_key("ada").peer)
    assert transport is not None
    transport.listener.transport_lost(NetworkError("the libp2p daemon died"))
    with pytest.raises(NetworkError, match="the libp2p daemon died"):
        await task
    assert watcher.last.phase == "finished"
    assert steps_of_optimiser(stage.run_folder("ada")) == watcher.last.inner_steps > 0


async def test_a_missing_text_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        await SessionStage(tmp_path).play("ada", Watcher(), StopRequest(), data=str(tmp_path / "missing"))


class ForgetfulTraining(LoopTraining):
    """Training in which a number of ada's first span becomes infinite, once, after some steps."""

    broken = False

    def _reach_border(self) -> None:
        state = self.state.states().get(SpanId(0, 0))
        if not ForgetfulTraining.broken and state is not None and state.head.height == 3:
            ForgetfulTraining.broken = True
            state.momentum_N.flags.writeable = True
            state.momentum_N[7] = np.inf
            state.momentum_N.flags.writeable = False
        super()._reach_border()


@pytest.mark.slow
@pytest.mark.parametrize("names", [("ada",), ("ada", "ben")])
async def test_a_span_with_damaged_memory_is_rebuilt_and_training_continues(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(built_in, "TrainingThread", ForgetfulTraining)
    monkeypatch.setattr(ForgetfulTraining, "broken", False)
    watchers = {name: Watcher() for name in names}
    stage = SessionStage(tmp_path)
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(stage.play(name, watchers[name], StopRequest(), founds=name == "ada", until_round=24))
    said = [text for name in names for text in watchers[name].texts("content")]
    assert [text for text in said if "could not follow an entry" in text], said
    assert [text for text in said if "repaired from the checkpoint and the entries on this disk" in text], said
    assert ForgetfulTraining.broken
    assert len({watchers[name].last.state_digest for name in names}) == 1
    assert all(watchers[name].last.phase == "finished" for name in names)
    last = next(event for event in reversed(watchers["ada"].events) if event.topic == "round")
    assert last.figures["num_entries"] == last.figures["num_spans"]


async def test_a_machine_that_computes_other_bytes_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(known_answer, "KNOWN_ANSWER", "of another machine")
    with pytest.raises(ConfigError, match="this machine computes different bytes than other peers"):
        await SessionStage(tmp_path).play("ada", Watcher(), StopRequest(), founds=True, until_round=4)
