"""The API for your own training loop: join or found a run, call `step` after each optimiser step, leave.

The event loop runs in a separate thread, so this works in a script, in a notebook with a running loop, and twice in one
process. It prints nothing, handles no signals and changes no process-wide settings.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self

import torch
import uvloop
from torch import Tensor, nn

from p2p_diloco.bandwidth.forecast import month_sentence
from p2p_diloco.config.invite import Invite, is_invite, parse_invite
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.new_file import check_new_folder, write_new_file, write_new_folder
from p2p_diloco.config.rounds import Conditions, choose_rounds, read_conditions
from p2p_diloco.config.run_file import (
    CHOSEN_ROUNDS,
    KEY_FILE,
    check_new_run,
    continued_values,
    draft_manifest,
    exported_run,
    values_by_key,
    write_new_run,
)
from p2p_diloco.config.run_plan import plan_run
from p2p_diloco.config.settings import PeerSettings, flags_as_keys, load_settings
from p2p_diloco.errors import ConfigError, NetworkError, P2PDilocoError, StateError
from p2p_diloco.ids import sha256
from p2p_diloco.island.inner_state import Stateful
from p2p_diloco.island.ranks import RANK_SECONDS, RankLost
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.session.export_files import Provenance, own_files, own_tensors
from p2p_diloco.session.learnt_model import RUN_FILE, load_source, start_of
from p2p_diloco.session.own_model import OwnModel, check_description, describe_model, island_of
from p2p_diloco.session.peer_plan import Founding, PeerPlan, read_founding
from p2p_diloco.session.start import nothing_left_if_refused, run_peer
from p2p_diloco.session.trained_state import TrainedState
from p2p_diloco.status.event_log import PeerEvent, event_line
from p2p_diloco.status.peer_files import PeerFiles
from p2p_diloco.status.status_file import PeerStatus

LEAVE_SECONDS, STOP_SECONDS = 10.0, 5.0
_LOOK_SECONDS = 0.02
_REST_SECONDS = 0.05
_TIMED_STEPS = 256
_MOST_TOKENS = 10**12
"""Tokens of a step; sums of more would not fit into a message."""
logger = logging.getLogger("p2p_diloco")

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
OnEvent = Callable[[PeerEvent], None]
OwnState = Mapping[str, Stateful] | None
RunToEnd = Callable[[Coroutine[Any, Any, None]], None]
AnySettings = PeerSettings | Mapping[str, object] | None


def new_run(
    path: str | Path,
    model: nn.Module,
    *,
    ignore: Sequence[str] = (),
    continue_from: str | Path | None = None,
    step_seconds: float | None = None,
    islands: int | None = None,
    uplink: str | None = None,
    lan: bool = False,
    traffic: str | None = None,
    **values: object,
) -> RunManifest:
    """Write a run file for training `model`, and the key that signs it next to it.

    Edit the file before the first peer joins; every change makes a different run. On several ranks of
    `torch.distributed`, call it on all of them; rank 0 writes the files.

    Args:
        path: path of the new file, such as "run.toml".
        ignore: names of frozen tensors or buffers that may differ between peers; all others must be equal.
        continue_from: state directory of a peer, folder of one run in it, or export, of a run of the same model. The
            new run starts from what that one has learnt, and takes over its values where none are given here.
        step_seconds: duration of an optimiser step, to choose the length of rounds; None: the default rounds.
        islands: number of islands that train at a time; default: the size of one averaging group.
        uplink: upload rate of the slowest island; default: 20mbit.
        lan: whether all machines are on one local network, where shorter rounds suffice.
        traffic: maximum that a machine sends and receives, such as "10GB/day"; default: no maximum.
        values: values that differ from the defaults, by section, such as rounds={"round_seconds": 10.0}.
    Raises:
        ConfigError: the file exists, a value is invalid, or a tensor of the model cannot be trained in a run.
    """
    _check_model(model)
    path, island = _run_path(path), island_of(model, RANK_SECONDS)
    conditions = None
    if step_seconds is not None:
        conditions = read_conditions(
            islands=islands, uplink=uplink, step_seconds=step_seconds, lan=lan, traffic=traffic
        )
    elif lan or any(each is not None for each in (islands, uplink, traffic)):
        raise ConfigError(
            "islands, uplink, lan and traffic have no effect without step_seconds; give the duration of a step, such "
            "as 0.3"
        )
    source = None if continue_from is None else Path(continue_from)
    write = partial(_write_new_run, path, values=values, conditions=conditions, source=source)
    if island is None:
        return write(describe_model(model, ignore))
    with island.together():
        described = describe_model(model, ignore, island.ranks)
    text = island.call("new_run", lambda reports: write(described).model_dump_json())
    return RunManifest.model_validate_json(text)


def _write_new_run(
    path: Path,
    described: Mapping[str, object],
    *,
    values: Mapping[str, object],
    conditions: Conditions | None,
    source: Path | None,
) -> RunManifest:
    key_path, now, start = path.with_name(KEY_FILE), time.time(), None
    check_new_run(path, key_path)
    sections: Mapping[str, object] = {**values, "model": described}
    if source is not None:
        learnt = load_source(source, None, "continue_from")
        for sentence in learnt.refused:
            logger.warning("%s; using an older one", sentence)
        check_description(described, learnt.manifest.model)
        start, digest = start_of(learnt)
        chosen_anew = CHOSEN_ROUNDS if conditions is not None else ()
        given = continued_values(learnt.manifest, values_by_key(values, "the new run"), chosen_anew)
        sections = given | {"model.start": digest, **{f"model.{key}": described[key] for key in ("rest", "ignored")}}
    draft = draft_manifest(now_seconds=now, name=path.stem, values=sections)
    given = values_by_key(sections, "the new run")
    if conditions is not None:
        chosen = choose_rounds(draft, given.keys(), conditions)
        sections = given | chosen.values
        for note in chosen.notes:
            logger.info(note)
    elif "rounds.fragments" not in given:  # a fragment consists of whole tensors
        fragments = min(draft.rounds.fragments, len(draft.model.tensors))
        sections = given | {"rounds.fragments": fragments}
    sentence, _ = month_sentence(plan_run(draft_manifest(now_seconds=now, name=path.stem, values=sections)).rules)
    logger.info(sentence)
    return write_new_run(path, key_path, now_seconds=now, values=sections, start=start)


def join(
    invite: str,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    settings: AnySettings = None,
    state: OwnState = None,
    wait: bool = True,
    timeout: float | None = None,
    until_round: int | None = None,
    rank_timeout: float = RANK_SECONDS,
    on_event: OnEvent | None = None,
) -> Swarm:
    """Join a run, and return once the model holds the run's current state.

    The ranks of `torch.distributed`, if it is initialised, are one island: all of them call this, and then the same
    methods of the swarm in the same order.

    Args:
        invite: the line that `bootstrap` and `status` print, p2pdiloco://…
        model: model with float32 parameters of the same names and shapes as the run's.
        optimizer: one or more optimisers, whose steps are counted. Without one, every call of `Swarm.step` is a step.
        settings: settings of this machine, such as {"state_directory": "peer-2", "max_upload": "20mbit"}.
        state: objects whose state is restored after a restart, by name: anything with `state_dict` and
            `load_state_dict`, such as a schedule or a data loader. Optimisers always are.
        wait: return only when the model holds the run's state; otherwise see `Swarm.ready`.
        timeout: maximum seconds to wait.
        until_round: end after this round; all peers with the same value end with the same bytes.
        rank_timeout: seconds that ranks wait for each other in a call before the island ends.
        on_event: called with each event, in a thread that must not be blocked; on rank 0 only.
    Raises:
        ConfigError: the invite, the model or the settings are invalid, or the ranks have different models.
        NetworkError: no peer answered in time.
        StateError: a rank is missing.
    """
    loop = OwnLoop(
        model=model,
        optimizer=optimizer,
        settings=settings,
        state=state,
        until_round=until_round,
        rank_timeout=rank_timeout,
    )
    return start(joiner_plan(invite, loop), wait=wait, timeout=timeout, on_event=on_event)


def found(
    run: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    settings: AnySettings = None,
    state: OwnState = None,
    until_round: int | None = None,
    rank_timeout: float = RANK_SECONDS,
    on_event: OnEvent | None = None,
) -> Swarm:
    """Found the run of a run file. After a restart, continue it.

    The run starts from the model's current parameters; one that continues another, from what that has learnt.

    Args:
        run: the file that `new_run` wrote, with its key next to it; only rank 0 reads them.
        model, optimizer, settings, state, until_round, rank_timeout, on_event: as for `join`.
    Raises:
        ConfigError: the run file, its key, the model or the settings are invalid, or the ranks have different models.
        StateError: a rank is missing.
    """
    loop = OwnLoop(
        model=model,
        optimizer=optimizer,
        settings=settings,
        state=state,
        until_round=until_round,
        rank_timeout=rank_timeout,
    )
    return start(founder_plan(run, loop), on_event=on_event)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The part of a rank other than 0 in a peer: it has no peer of its own."""

    settings: PeerSettings
    training: OwnModel


class Swarm:
    """One peer of a run, controlled from a training loop. Created by `join` and `found`.

    Call its methods from the training thread. `leave` and `status` may be called from any thread.

    If the island has several ranks, call each method on all ranks, in the same order and from the training thread;
    `status`, `invite` and `step_seconds` may be called on one rank. Rank 0 is the peer: `status`, `invite` and events
    are empty on the others.
    """

    def __init__(self, plan: PeerPlan | RankPlan, on_event: OnEvent | None, run_to_end: RunToEnd) -> None:
        assert isinstance(plan.training, OwnModel)
        self._plan = plan
        self._own = plan.training
        self._island = plan.training.island
        self._observer = _Observer(plan.settings.state_directory, on_event)
        self._run_to_end = run_to_end
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._running = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: StopRequest | None = None
        self._step_seconds: deque[float] = deque(maxlen=_TIMED_STEPS)
        self._shows_anchor = False
        self._process = os.getpid()
        if isinstance(plan, RankPlan):
            return
        if self._island is not None:
            self._island.when_lost(lambda: self._ask(lambda stop: stop.leave()))
        self._thread = threading.Thread(target=self._run, args=(plan,), name="p2p_diloco", daemon=True)
        self._thread.start()
        self._running.wait()
        _leave_at_exit(self)

    # -- the loop

    @property
    def ready(self) -> bool:
        """Whether the model holds the run's state and this peer is running."""
        return bool(self._together("ready", self._is_ready, when_over=False))

    def step(self, tokens: int, loss: float | None = None) -> bool:
        """Count a training step, update the model, and contribute if a round asks for it. Never waits for the network.

        It returns later only while the machine's owner has paused this peer, or limits its share of the device
        (`gpu_duty`). Call it once after each `optimizer.step()`. While gradients accumulate between two optimiser
        steps, it only counts tokens.

        Args:
            tokens: tokens trained on since the last call, by this rank; the island's count is the sum over its ranks.
            loss: loss of the step, published to other peers if it is finite; of several ranks, their mean.
        Returns:
            Whether to continue; False once the run is over or this peer has left.
        Raises:
            ConfigError: an argument is not a number that it can be, this is within `anchor`, or steps leave the model
                not finite again and again; a single one is undone.
            P2PDilocoError: the peer has failed, for example because of a full disk.
            StateError: another rank of this island has ended or does not answer. This island has ended.
        """
        began = time.perf_counter()
        tokens, loss = _step_figures(tokens, loss)
        if self._shows_anchor:
            raise ConfigError(
                "step was called inside anchor(), where the model holds the shared state; call it outside the block"
            )
        if self._island is None:
            goes_on = self._step(tokens, loss, self._own.first_not_finite())
        elif self._island.is_over and self._island.lost is None:
            goes_on = False
        else:
            broken = self._own.number_of(self._own.first_not_finite())
            numbers = (tokens, 0.0 if loss is None else loss, loss is not None, broken)
            goes_on = bool(self._island.call("step", self._step_of_ranks, numbers))
        if goes_on:
            self._step_seconds.append(time.perf_counter() - began)
            if self._island is None:
                self._rest()
        return goes_on

    def _rest(self) -> None:
        """Wait while the machine's owner has paused this peer, or until its share of the device allows a step.

        Meanwhile, entries are still applied to the model.
        """
        end = time.monotonic() + self._own.seconds_to_rest()
        while not self._ended.is_set() and (self._own.pace.is_paused or time.monotonic() < end):
            state = self._own.state
            if state is not None and state.begin():
                self._own.border()
            if self._island is not None:
                self._island.check_present()
            self._ended.wait(_REST_SECONDS)
        self._own.note_rest()

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """Load the shared state into the model for the block, to evaluate or save it; then restore the local state."""
        if self._shows_anchor:  # a block inside another; a merge now would be lost with the anchor that it moves
            yield
            return
        self._together("anchor", self._load_anchor)
        self._shows_anchor = True
        try:
            yield
        finally:
            self._shows_anchor = False
            self._restore()

    def save(self, path: str | Path) -> None:
        """Write the shared model to a new safetensors file, with the names of the model's `state_dict`.

        The file includes this model's frozen tensors and buffers. `save` and `export` also work after the end. Of
        several ranks, rank 0 writes it.

        Raises:
            ConfigError: the file exists.
            StateError: the model does not hold the run's state yet, or the disk is full.
        """
        self._together("save", lambda: write_new_file(Path(path), own_tensors(*self._shared()), mode=0o666))

    def export(self, folder: str | Path) -> None:
        """Write the shared model to a new folder: the file that `save` writes, a model card, and the run's values.

        Raises:
            ConfigError: the folder exists.
            StateError: as for `save`.
        """

        def write() -> None:
            check_new_folder(Path(folder))
            files = own_files(*self._shared(), is_whole=True)
            write_new_folder(Path(folder), {**files, RUN_FILE: exported_run(self._held().local.plan.manifest)})

        self._together("export", write)

    # -- status

    @property
    def status(self) -> PeerStatus:
        """The latest status, updated about once a second; the same as `p2p-diloco status` shows."""
        return self._observer.latest

    @property
    def invite(self) -> str:
        """The invite of this run; empty while it is not usable."""
        return self.status.invite or self._observer.invite

    @property
    def step_seconds(self) -> float:
        """Mean duration of recent calls of `step`, in seconds."""
        return fmean(self._step_seconds) if self._step_seconds else 0.0

    @property
    def progress(self) -> float:
        """Completed share of the planned cycles, 0 to 1, for learning-rate schedules."""
        return float(self._together("progress", lambda: self._held().fraction))

    @property
    def batch_scale(self) -> float:
        """Advice: the multiple of this loop's first batch with which a cycle has about the planned steps.

        A power of two, from 1/256 to 2; 1.0 at first, and in a run without `rounds.planned_steps`. It follows from the
        times between calls of `step`, and changes seldom. Nothing is applied: a loop may take larger or smaller batches
        accordingly, at once or after its next start, from which on its batch then counts as 1.0.
        """
        return float(self._together("batch_scale", lambda: self._own.batch_scale, when_over=1.0))

    @property
    def seed(self) -> int:
        """A seed unique to this rank and this start of this peer, for sampling its own data."""
        text = str(self._together("seed", self._source_of_seed))
        if self._island is not None and not self._island.leads:
            text = f"{text} {self._island.ranks.rank}"
        return int.from_bytes(sha256(b"p2p-diloco data seed 1\n", text.encode())[:7], "little")

    # -- leaving

    def leave(self) -> None:
        """Finish the round, announce the leave, save and end, in at most about 15 seconds. Ctrl-C ends it at once."""
        if os.getpid() != self._process:
            return  # a forked child has no peer
        try:
            if self._island is None or self._island.is_over:
                self._leave(saves=self._island is None)
            else:
                self._island.call("leave", lambda reports: self._leave(saves=not self._island_is_over()))
        except RankLost:
            self._leave(saves=False)
        finally:
            self._own.close(saves=False)

    def leave_alone(self) -> None:
        """Leave without the other ranks, as at the end of the process."""
        if self._island is not None:
            self._island.give_up()
        self.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._island is not None:
            self._island.hurry()
        self.leave()
        if kind is None:
            self._raise_failure()

    # -- internal

    def _together(self, name: str, work: Callable[[], Any], *, when_over: float | None = None) -> Any:
        """Return what `work` returns on rank 0; if the island has several ranks, all of them make this call.

        Args:
            when_over: the result once rank 0 has left without this rank; None: that is an error.
        """
        if self._island is None:
            return work()
        result = None
        if self._island.lost is not None or not self._island.is_over:
            result = self._island.call(name, lambda reports: work())
        if not self._island.is_over:
            return result
        if when_over is None:
            raise StateError("rank 0 of this island has left the run; start all its ranks again to continue")
        return when_over

    def _island_is_over(self) -> bool:
        return self._island is not None and self._island.is_over

    def _is_ready(self) -> bool:
        state = self._own.state
        is_known = bool(self.status.run) and not self._ended.is_set()
        return is_known and state is not None and state.begin()

    def _step(self, tokens: int, loss: float | None, broken: str) -> bool:
        if self._ended.is_set():
            self._own.close()
            self._raise_failure()
            return False
        state = self._own.state
        if state is not None and state.begin():
            self._own.stepped(tokens, loss, broken)
            self._own.border()
        return True

    def _step_of_ranks(self, reports: list[list[float]]) -> bool:
        losses = [loss for _, loss, is_given, _ in reports if is_given]
        broken = next((self._own.name_of(int(number)) for _, _, _, number in reports if number), "")
        tokens = sum(int(tokens) for tokens, *_ in reports)
        goes_on = self._step(tokens, fmean(losses) if losses else None, broken)
        if goes_on:
            self._rest()  # within the call, so that the other ranks wait for its end
        return goes_on

    def _load_anchor(self) -> None:
        state = self._held()
        state.border()
        state.local.parameters.keep()
        for span, held in state.states().items():
            state.local.write(span, held.anchor_N)

    def _restore(self) -> None:
        """Set θ to what it was before `_load_anchor`; each rank does this by itself."""
        if self._island is not None and not self._island.leads:
            self._island.restore()
        else:
            state = self._own.state
            assert state is not None, "the anchor was loaded"
            state.local.parameters.restore()

    def _source_of_seed(self) -> str:
        self._held()
        status = self.status
        return f"{status.run} {status.peer} {status.incarnation}"

    def _leave(self, *, saves: bool) -> None:
        try:
            self._ask(lambda stop: stop.leave())
            if not self._join(LEAVE_SECONDS):
                self._ask(lambda stop: stop.stop_now())
                self._join(STOP_SECONDS)
        except KeyboardInterrupt:
            self._ask(lambda stop: stop.stop_now())
            self._join(STOP_SECONDS)
            raise
        finally:
            self._own.close(saves=saves)

    def wait_until_ready(self, timeout: float | None) -> None:
        """Wait until the model holds the run's state.

        Raises:
            NetworkError: it took longer than `timeout` seconds.
            P2PDilocoError: the peer has failed.
        """
        self._together("wait", lambda: self._wait_until_ready(timeout))

    def _wait_until_ready(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_ready():
            if self._island is not None:
                self._island.check_present()
            if self._ended.wait(_LOOK_SECONDS):
                self._raise_failure()
                raise StateError("the run was over before this peer held its state")
            if deadline is not None and time.monotonic() > deadline:
                raise NetworkError(
                    f"the run's state did not arrive within {timeout:g} s ({self.status.phase}); wait longer, or see "
                    f"{self._plan.settings.state_directory / 'events.jsonl'} for what happened"
                )

    def _shared(self) -> tuple[dict[str, Tensor], Provenance]:
        """Return all tensors with the shared state, and their provenance."""
        state, status = self._held(), self.status
        if self._shows_anchor:
            tensors = self._own.tensors()
        else:
            self._load_anchor()
            try:
                tensors = self._own.tensors()
            finally:
                state.local.parameters.restore_all()
        held, progress = state.states(), state.progress()
        rounds = max(0, *(span.head.round + 1 for span in held.values()))
        return tensors, Provenance(
            run_name=status.run_name,
            run=status.run,
            text=None,
            rounds=rounds,
            cycles=rounds / len({span.fragment for span in held}),
            tokens=progress.tokens or None,
            training_loss=progress.loss if progress.steps else None,
        )

    def _held(self) -> TrainedState:
        state = self._own.state
        if state is None or not self.status.run or not state.begin():
            raise StateError("the model does not hold the run's state yet; wait until the swarm is ready")
        return state

    def _run(self, plan: PeerPlan) -> None:
        try:
            with nothing_left_if_refused(plan), closing(self._observer):
                self._run_to_end(self._be_peer(plan))
        except BaseException as error:
            self._failure = error
            if isinstance(error, P2PDilocoError):
                error.args = (flags_as_keys(str(error)),)
            else:
                logger.exception("the peer ended with an error")
        finally:
            self._ended.set()
            self._running.set()

    async def _be_peer(self, plan: PeerPlan) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), StopRequest()
        self._running.set()
        await run_peer(plan, self._observer, self._stop)

    def _ask(self, call: Callable[[StopRequest], None]) -> None:
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and not self._ended.is_set():
            try:
                loop.call_soon_threadsafe(call, stop)
            except RuntimeError:  # the loop has just ended
                return

    def _join(self, seconds: float) -> bool:
        """Wait for the peer to end; return whether it did in time."""
        if isinstance(self._plan, RankPlan):
            return True
        if self._island is None or not self._island.ranks.following.is_set():
            return self._ended.wait(seconds)
        return self._island.wait(self._ended, seconds)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoop:
    """A user's model, optimisers and options on this rank; see `join`."""

    model: nn.Module
    optimizer: Optimizers = None
    settings: AnySettings = None
    state: OwnState = None
    until_round: int | None = None
    rank_timeout: float = RANK_SECONDS


def joiner_plan(invite: str, loop: OwnLoop) -> PeerPlan | RankPlan:
    """Return the plan of `join` for this rank; from here on the model counts as in a run."""
    return _plan_of(lambda: parse_invite(invite), loop)


def founder_plan(run: str | Path, loop: OwnLoop) -> PeerPlan | RankPlan:
    """Return the plan of `found` for this rank; from here on the model counts as in a run."""
    return _plan_of(lambda: read_founding(_run_path(run)), loop)


def _plan_of(source: Callable[[], Founding | Invite], loop: OwnLoop) -> PeerPlan | RankPlan:
    _check_model(loop.model)
    island = island_of(loop.model, loop.rank_timeout)
    plan: PeerPlan | RankPlan | None = None
    try:
        with island.together() if island is not None else nullcontext():
            settings = _settings_of(loop.settings)
            found = source() if island is None or island.leads else None
            training = OwnModel(loop.model, _listed(loop.optimizer), loop.state, island)
            if found is None:
                plan = RankPlan(settings=settings, training=training)
            else:
                plan = PeerPlan(settings=settings, source=found, training=training, until_round=loop.until_round)
        training.meet_ranks(settings.state_directory)
    except BaseException:
        if plan is not None:
            training.close(saves=False)
        raise
    assert plan is not None, "an error would have been raised"
    return plan


def start(
    plan: PeerPlan | RankPlan,
    *,
    wait: bool = True,
    timeout: float | None = None,
    on_event: OnEvent | None = None,
    run_to_end: RunToEnd = uvloop.run,
) -> Swarm:
    """Start a peer in a separate thread; see `join`.

    Args:
        run_to_end: runs the peer until its end; called in that thread.
    """
    swarm = Swarm(plan, on_event, run_to_end)
    try:
        if wait:
            swarm.wait_until_ready(timeout)
    except BaseException:
        swarm.leave()
        raise
    return swarm


class _Observer:
    """Keeps the latest status for the caller and writes the files that `p2p-diloco status` reads."""

    def __init__(self, folder: Path, on_event: OnEvent | None) -> None:
        self.latest = PeerStatus()
        self.invite = ""
        self._files = PeerFiles(folder)
        self._on_event = on_event
        # A slow disk must not block the event loop.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="files")

    def close(self) -> None:
        self._writer.shutdown()

    def listening(self, invite: str, *, own_model: bool) -> None:
        self.invite = invite

    def status(self, status: PeerStatus) -> None:
        self.latest = status
        self._keep(lambda: self._files.status(status))

    def event(self, event: PeerEvent) -> None:
        event = replace(event, text=flags_as_keys(event.text))
        logger.log(logging.DEBUG if event.topic == "round" else logging.INFO, event_line(event))
        self._keep(lambda: self._files.event(event))
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("on_event failed")

    def _keep(self, write: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # closed: a thread of the peer reported something after the end
            self._writer.submit(_warned, write)


def _warned(write: Callable[[], None]) -> None:
    try:
        write()
    except StateError as error:
        logger.warning("%s", error)


def _leave_at_exit(swarm: Swarm) -> None:
    """Make a swarm leave when the interpreter exits, if it has not left by then.

    `atexit` would be too late, because executors accept no work then, and leaving needs them to save. This callback
    runs before they shut down, because theirs were registered earlier.
    """
    found = weakref.ref(swarm)

    def leave() -> None:
        if (running := found()) is not None:
            running.leave_alone()

    threading._register_atexit(leave)  # type: ignore[attr-defined]


def _step_figures(tokens: Any, loss: Any) -> tuple[int, float | None]:
    """Return the arguments of `step` as plain numbers; a loop may give tensors of one element.

    Raises:
        ConfigError: one is no such number.
    """
    try:
        figure = None if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
        whole = int(tokens)
        if whole == tokens and 0 <= whole <= _MOST_TOKENS:
            return whole, figure
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise ConfigError(
        f"step(tokens={tokens!r}, loss={loss!r}): tokens must be a whole number from 0 to {_MOST_TOKENS:,}, the tokens "
        "since the last call, and loss a number or None"
    )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is of type {type(model).__name__}; expected a torch.nn.Module")


def _run_path(run: object) -> Path:
    """Return the path of a run file.

    Raises:
        ConfigError: it has no name.
    """
    if not isinstance(run, str | Path) or not Path(run).name:
        raise ConfigError(f'the run is {run!r}; expected the path of a run file, such as "run.toml"')
    if is_invite(str(run)):
        raise ConfigError("this is an invite and not the path of a run file; join its run with p2p_diloco.join")
    return Path(run)


def _settings_of(settings: AnySettings) -> PeerSettings:
    """Return the settings, with absolute folders, since the program may change its working directory."""
    if settings is not None and not isinstance(settings, PeerSettings | Mapping):
        raise ConfigError(f'settings are of type {type(settings).__name__}; expected a dict, such as {{"port": 31337}}')
    own = settings if isinstance(settings, PeerSettings) else load_settings(flags=settings, flags_source="settings")
    scalars = own.tensorboard.absolute() if own.tensorboard is not None else None
    return own.model_copy(update={"state_directory": own.state_directory.absolute(), "tensorboard": scalars})


def _listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    listed = list(optimizer) if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
    for each in listed:
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(
                f"an optimiser is of type {type(each).__name__}; expected torch.optim.Optimizer, or a list of them"
            )
    return listed
