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
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self

import torch
import uvloop
from torch import Tensor, nn

from p2p_diloco.config.invite import parse_invite
from p2p_diloco.config.key_file import read_key_file
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.new_file import check_new_folder, write_new_file, write_new_folder
from p2p_diloco.config.run_file import (
    KEY_FILE,
    check_new_run,
    draft_manifest,
    read_run_toml,
    values_by_key,
    write_new_run,
)
from p2p_diloco.config.settings import PeerSettings, flags_as_keys, load_settings
from p2p_diloco.errors import ConfigError, NetworkError, P2PDilocoError, StateError
from p2p_diloco.ids import sha256
from p2p_diloco.peer.own_model import OwnModel, describe_model
from p2p_diloco.peer.peer_plan import Founding, PeerPlan
from p2p_diloco.peer.run_plan import plan_run
from p2p_diloco.peer.start import nothing_left_if_refused, run_peer
from p2p_diloco.peer.stop import StopRequest
from p2p_diloco.peer.trained_state import TrainedState
from p2p_diloco.planning.rounds import Conditions, choose_rounds
from p2p_diloco.rate import parse_rate
from p2p_diloco.status.event_log import PeerEvent, append_event, event_line
from p2p_diloco.status.status_file import PeerStatus, write_status
from p2p_diloco.storage.inner_state import Stateful
from p2p_diloco.training.own_files import own_files, own_tensors
from p2p_diloco.training.provenance import Provenance

LEAVE_SECONDS, STOP_SECONDS = 10.0, 5.0
_LOOK_SECONDS = 0.02
_TIMED_STEPS = 256
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
    step_seconds: float | None = None,
    islands: int | None = None,
    uplink: str | None = None,
    **values: object,
) -> RunManifest:
    """Write a run file for training `model`, and the key that signs it next to it.

    Edit the file before the first peer joins; every change makes a different run.

    Args:
        path: path of the new file, such as "run.toml".
        ignore: names of frozen tensors or buffers that may differ between peers; all others must be equal.
        step_seconds: duration of an optimiser step, to choose the length of rounds; None: the default rounds.
        islands: number of islands that train at a time; default: the size of one averaging group.
        uplink: upload rate of the slowest island; default: 20mbit.
        values: values that differ from the defaults, by section, such as rounds={"round_seconds": 10.0}.
    Raises:
        ConfigError: the file exists, a value is invalid, or a tensor of the model cannot be trained in a run.
    """
    path = Path(path)
    key_path, now = path.with_name(KEY_FILE), time.time()
    check_new_run(path, key_path)
    sections: Mapping[str, object] = {**values, "model": describe_model(model, ignore)}
    draft = draft_manifest(now_seconds=now, name=path.stem, values=sections)
    given = values_by_key(sections, "the new run")
    if step_seconds is not None:
        conditions = Conditions(
            islands=draft.membership.group_size if islands is None else islands,
            uplink_bits=parse_rate("20mbit" if uplink is None else uplink, "uplink"),
            step_seconds=step_seconds,
        )
        chosen = choose_rounds(draft, given.keys(), conditions)
        sections = given | chosen.values
        for note in chosen.notes:
            logger.info(note)
    elif islands is not None or uplink is not None:
        raise ConfigError(
            "islands and uplink have no effect without step_seconds; give the duration of a step, such as 0.3"
        )
    elif "rounds.fragments" not in given:  # a fragment consists of whole tensors
        fragments = min(draft.rounds.fragments, len(draft.model.tensors))
        sections = given | {"rounds.fragments": fragments}
    plan_run(draft_manifest(now_seconds=now, name=path.stem, values=sections))
    return write_new_run(path, key_path, now_seconds=now, values=sections)


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
    on_event: OnEvent | None = None,
) -> Swarm:
    """Join a run, and return once the model holds the run's current state.

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
        on_event: called with each event, in a thread that must not be blocked.
    Raises:
        ConfigError: the invite, the model or the settings are invalid.
        NetworkError: no peer answered in time.
    """
    plan = joiner_plan(invite, model, optimizer, settings=settings, state=state, until_round=until_round)
    return start(plan, wait=wait, timeout=timeout, on_event=on_event)


def found(
    run: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    settings: AnySettings = None,
    state: OwnState = None,
    until_round: int | None = None,
    on_event: OnEvent | None = None,
) -> Swarm:
    """Found the run of a run file, starting from the model's current parameters. After a restart, continue the run.

    Args:
        run: the file that `new_run` wrote, with its key next to it.
        model, optimizer, settings, state, until_round, on_event: as for `join`.
    Raises:
        ConfigError: the run file, its key, the model or the settings are invalid.
    """
    plan = founder_plan(run, model, optimizer, settings=settings, state=state, until_round=until_round)
    return start(plan, on_event=on_event)


class Swarm:
    """One peer of a run, controlled from a training loop. Created by `join` and `found`.

    Call its methods from the training thread. `leave` and `status` may be called from any thread.
    """

    def __init__(self, plan: PeerPlan, on_event: OnEvent | None, run_to_end: RunToEnd) -> None:
        assert isinstance(plan.training, OwnModel)
        self._plan = plan
        self._own = plan.training
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
        self._thread = threading.Thread(target=self._run, name="p2p_diloco", daemon=True)
        self._thread.start()
        self._running.wait()
        _leave_at_exit(self)

    # -- the loop

    @property
    def ready(self) -> bool:
        """Whether the model holds the run's state and this peer is running."""
        state = self._own.state
        is_known = bool(self.status.run) and not self._ended.is_set()
        return is_known and state is not None and state.begin()

    def step(self, tokens: int, loss: float | None = None) -> bool:
        """Count a training step, update the model, and contribute if a round asks for it. Never waits for the network.

        Call it once after each `optimizer.step()`. While gradients accumulate between two optimiser steps, it only
        counts tokens.

        Args:
            tokens: tokens trained on since the last call.
            loss: loss of the step, published to other peers.
        Returns:
            Whether to continue; False once the run is over or this peer has left.
        Raises:
            P2PDilocoError: the peer has failed, for example because of a full disk.
        """
        began = time.perf_counter()
        if self._ended.is_set():
            self._own.close()
            self._raise_failure()
            return False
        state = self._own.state
        if state is not None and state.begin():
            self._own.stepped(tokens, loss)
            self._own.border()
        self._step_seconds.append(time.perf_counter() - began)
        return True

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """Load the shared state into the model for the block, to evaluate or save it; then restore the local state."""
        state = self._held()
        if self._shows_anchor:  # a block inside another; a merge now would be lost with the anchor that it moves
            yield
            return
        state.border()
        before = state.local.parameters.read_all()
        for span, held in state.states().items():
            state.local.write(span, held.anchor_N)
        self._shows_anchor = True
        try:
            yield
        finally:
            self._shows_anchor = False
            state.local.parameters.load_flat(before)

    def save(self, path: str | Path) -> None:
        """Write the shared model to a new safetensors file, with the names of the model's `state_dict`.

        The file includes this model's frozen tensors and buffers. `save` and `export` also work after the end.

        Raises:
            ConfigError: the file exists.
            StateError: the model does not hold the run's state yet, or the disk is full.
        """
        write_new_file(Path(path), own_tensors(*self._shared()), mode=0o666)

    def export(self, folder: str | Path) -> None:
        """Write the shared model to a new folder: the file that `save` writes, and a model card.

        Raises:
            ConfigError: the folder exists.
            StateError: as for `save`.
        """
        check_new_folder(Path(folder))
        write_new_folder(Path(folder), own_files(*self._shared(), is_whole=True))

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
        return self._held().fraction

    @property
    def seed(self) -> int:
        """A seed unique to this start of this peer, for sampling its own data."""
        self._held()
        status = self.status
        said = f"{status.run} {status.peer} {status.incarnation}"
        return int.from_bytes(sha256(b"p2p-diloco data seed 1\n", said.encode())[:7], "little")

    # -- leaving

    def leave(self) -> None:
        """Finish the round, announce the leave, save and end, in at most about 15 seconds. Ctrl-C ends it at once."""
        if os.getpid() != self._process:
            return  # a forked child has no peer
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
            self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        if kind is None:
            self._raise_failure()

    # -- internal

    def wait_until_ready(self, timeout: float | None) -> None:
        """Wait until the model holds the run's state.

        Raises:
            NetworkError: it took longer than `timeout` seconds.
            P2PDilocoError: the peer has failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.ready:
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
        with self.anchor():
            tensors = self._own.tensors()
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

    def _run(self) -> None:
        try:
            with nothing_left_if_refused(self._plan), closing(self._observer):
                self._run_to_end(self._be_peer())
        except BaseException as error:
            self._failure = error
            if isinstance(error, P2PDilocoError):
                error.args = (flags_as_keys(str(error)),)
            else:
                logger.exception("the peer ended with an error")
        finally:
            self._ended.set()
            self._running.set()

    async def _be_peer(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), StopRequest()
        self._running.set()
        await run_peer(self._plan, self._observer, self._stop)

    def _ask(self, call: Callable[[StopRequest], None]) -> None:
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and not self._ended.is_set():
            try:
                loop.call_soon_threadsafe(call, stop)
            except RuntimeError:  # the loop has just ended
                return

    def _join(self, seconds: float) -> bool:
        """Wait for the peer to end; return whether it did in time."""
        return self._ended.wait(seconds)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def joiner_plan(
    invite: str,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    settings: AnySettings,
    state: OwnState,
    until_round: int | None,
) -> PeerPlan:
    """Return the peer plan of `join`; from here on the model counts as in a run."""
    own_settings, parsed = _settings_of(settings), parse_invite(invite)
    return PeerPlan(
        settings=own_settings,
        source=parsed,
        training=OwnModel(model, _listed(optimizer), state),
        until_round=until_round,
    )


def founder_plan(
    run: str | Path,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    settings: AnySettings,
    state: OwnState,
    until_round: int | None,
) -> PeerPlan:
    """Return the peer plan of `found`; from here on the model counts as in a run."""
    path = Path(run)
    key = read_key_file(path.with_name(KEY_FILE))
    signed, own_settings = read_run_toml(path).sign(key), _settings_of(settings)
    return PeerPlan(
        settings=own_settings,
        source=Founding(signed=signed, organiser_key=key),
        training=OwnModel(model, _listed(optimizer), state),
        until_round=until_round,
    )


def start(
    plan: PeerPlan,
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
        self._folder = folder
        self._on_event = on_event
        # A slow disk must not block the event loop.
        self._files = ThreadPoolExecutor(1, thread_name_prefix="files")

    def close(self) -> None:
        """Wait until the files are written."""
        self._files.shutdown()

    def listening(self, invite: str, *, own_model: bool) -> None:
        """Store the invite of a founded run."""
        self.invite = invite

    def status(self, status: PeerStatus) -> None:
        """Store and write the status."""
        self.latest = status
        self._keep(lambda: write_status(self._folder, status))

    def event(self, event: PeerEvent) -> None:
        """Log an event and pass it on."""
        event = replace(event, text=flags_as_keys(event.text))
        logger.log(logging.DEBUG if event.topic == "round" else logging.INFO, event_line(event))
        self._keep(lambda: append_event(self._folder, event))
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("on_event failed")

    def _keep(self, write: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # closed: a thread of the peer reported something after the end
            self._files.submit(_warned, write)


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
            running.leave()

    threading._register_atexit(leave)  # type: ignore[attr-defined]


def _settings_of(settings: AnySettings) -> PeerSettings:
    """Return the settings, with absolute folders, since the program may change its working directory."""
    own = settings if isinstance(settings, PeerSettings) else load_settings(flags=settings, flags_source="settings")
    scalars = own.tensorboard.absolute() if own.tensorboard is not None else None
    return own.model_copy(update={"state_directory": own.state_directory.absolute(), "tensorboard": scalars})


def _listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
