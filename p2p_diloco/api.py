"""The way in for a loop of one's own: join or found a run, call `step` after each optimiser step, leave.

The event loop lives in a thread beside the caller's, so this works in a script, in a notebook whose own loop runs, and
twice in one process. It prints nothing, takes no signals and changes nothing that belongs to the process.
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
    """Write the run file of a run that trains `model`, and the key that signs it beside it.

    Edit the file before the first peer joins; every change makes another run.

    Args:
        path: of the new file, such as "run.toml".
        ignore: names of frozen tensors or buffers that may differ between peers; all others must be equal.
        step_seconds: that a step of the optimizer takes. Rounds are then as long as suits it; else they keep their
            defaults.
        islands: that train at a time; as many as average in one group if not named.
        uplink: of the slowest island; 20mbit if not named.
        values: what differs from the defaults, by section, such as rounds={"round_seconds": 10.0}.
    Raises:
        ConfigError: the file exists, a value does not fit, or a tensor of the model cannot take part.
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
            "islands and uplink say nothing without step_seconds; name how long a step takes, such as 0.3"
        )
    elif "rounds.fragments" not in given:  # a fragment is of whole tensors
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
    """Join a run, and return once the model holds what the run has learnt.

    Args:
        invite: the line that `bootstrap` and `status` print, p2pdiloco://…
        model: float32 parameters, of the same names and shapes as the run's.
        optimizer: whose steps are counted; several are fine. Without one every call of `Swarm.step` is a step.
        settings: this machine's choices, such as {"state_directory": "peer-2", "max_upload": "20mbit"}.
        state: what goes on where it was after a restart, by name: anything with `state_dict` and `load_state_dict`,
            such as a schedule or a data loader. Optimisers do in any case.
        wait: return only when the model holds the run's state; else see `Swarm.ready`.
        timeout: seconds to wait at most.
        until_round: end after this round, as all who name the same one: with the same bytes.
        on_event: called with each event, in a thread that must not be kept waiting.
    Raises:
        ConfigError: the invite, the model or the settings do not fit.
        NetworkError: nobody answered, or not in time.
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
    """Found the run of a run file; it starts from what the model holds now. Started again, it goes on.

    Args:
        run: the file that `new_run` wrote, its key beside it.
        model, optimizer, settings, state, until_round, on_event: as for `join`.
    Raises:
        ConfigError: the run file, its key, the model or the settings do not fit.
    """
    plan = founder_plan(run, model, optimizer, settings=settings, state=state, until_round=until_round)
    return start(plan, on_event=on_event)


class Swarm:
    """One peer of a run, seen from the loop that trains its model. Made by `join` and `found`.

    Call its methods from the thread that steps the model. `leave` and `status` may be called from any thread.
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
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="p2p_diloco", daemon=True)
        self._thread.start()
        self._running.wait()
        _leave_at_exit(self)

    # -- the loop

    @property
    def ready(self) -> bool:
        """Whether the model holds the run's state and this peer takes part."""
        state = self._own.state
        is_known = bool(self.status.run) and not self._ended.is_set()
        return is_known and state is not None and state.begin()

    def step(self, tokens: int, loss: float | None = None) -> bool:
        """Count what was trained, bring the model up to date, and hand over what is due. Never waits for the network.

        Call it once after each `optimizer.step()`. Between two steps of the optimiser, while gradients accumulate, it
        only adds tokens.

        Args:
            tokens: trained on since the last call.
            loss: of the step, for others to see.
        Returns:
            Whether to go on; False once the run is over or this peer has left.
        Raises:
            P2PDilocoError: what the caller must know, such as a full disk.
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
        """Let the model hold the shared state inside the block, to evaluate or to save it; then its own again."""
        state = self._held()
        state.border()
        before = state.local.parameters.read_all()
        for span, held in state.states().items():
            state.local.write(span, held.anchor_N)
        try:
            yield
        finally:
            state.local.parameters.load_flat(before)

    def save(self, path: str | Path) -> None:
        """Write the shared model to a new file of safetensors, by the names of the model's `state_dict`.

        Frozen tensors and buffers are in it, as this model holds them. So does `export`; both work after the end too.

        Raises:
            ConfigError: the file exists.
            StateError: the model does not hold the run's state yet, or the disk is full.
        """
        write_new_file(Path(path), own_tensors(*self._shared()), mode=0o666)

    def export(self, folder: str | Path) -> None:
        """Write the shared model to a new folder: what `save` writes, and a model card that tells of the run.

        Raises:
            ConfigError: the folder is not new.
            StateError: as for `save`.
        """
        check_new_folder(Path(folder))
        write_new_folder(Path(folder), own_files(*self._shared(), is_whole=True))

    # -- what can be seen

    @property
    def status(self) -> PeerStatus:
        """The latest status, updated about once a second; the same that `p2p-diloco status` shows."""
        return self._observer.latest

    @property
    def invite(self) -> str:
        """The line that joins this run; empty while nobody could use it."""
        return self.status.invite or self._observer.invite

    @property
    def step_seconds(self) -> float:
        """Seconds that a call of `step` takes, the mean of the last ones."""
        return fmean(self._step_seconds) if self._step_seconds else 0.0

    @property
    def progress(self) -> float:
        """The share of the planned cycles that the run has completed, 0 to 1, for learning-rate schedules."""
        return self._held().fraction

    @property
    def seed(self) -> int:
        """A number of this start of this peer, for drawing its own data."""
        self._held()
        status = self.status
        said = f"{status.run} {status.peer} {status.incarnation}"
        return int.from_bytes(sha256(b"p2p-diloco data seed 1\n", said.encode())[:7], "little")

    # -- leaving

    def leave(self) -> None:
        """Finish the round, say good-bye, save and go; at most some 15 seconds. Ctrl-C meanwhile goes at once."""
        if os.getpid() != self._process:
            return  # a forked child has none of this
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

    # -- inside

    def wait_until_ready(self, timeout: float | None) -> None:
        """Wait until the model holds the run's state.

        Raises:
            NetworkError: that took longer than `timeout` seconds.
            P2PDilocoError: why it will not.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.ready:
            if self._ended.wait(_LOOK_SECONDS):
                self._raise_failure()
                raise StateError("the run was over before this peer held its state")
            if deadline is not None and time.monotonic() > deadline:
                raise NetworkError(
                    f"the run's state did not come within {timeout:g} s ({self.status.phase}); wait longer, or see "
                    f"{self._plan.settings.state_directory / 'events.jsonl'} for what happened"
                )

    def _shared(self) -> tuple[dict[str, Tensor], Provenance]:
        """Return all tensors with the shared state in them, and where that comes from."""
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
            except RuntimeError:  # it has just ended
                return

    def _join(self, seconds: float) -> bool:
        """Wait for the end of the peer; return whether it came in time."""
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
    """Return what `join` asks of a peer; the model takes part from here on."""
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
    """Return what `found` asks of a peer; the model takes part from here on."""
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
    """Start a peer in a thread of its own; see `join`.

    Args:
        run_to_end: runs the peer and returns when it has ended, called in that thread.
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
        # A slow disk must not hold the event loop.
        self._files = ThreadPoolExecutor(1, thread_name_prefix="files")

    def close(self) -> None:
        """Wait until the files are written."""
        self._files.shutdown()

    def listening(self, invite: str, *, own_model: bool) -> None:
        """Keep the invite of a founded run."""
        self.invite = invite

    def status(self, status: PeerStatus) -> None:
        """Keep how things stand."""
        self.latest = status
        self._keep(lambda: write_status(self._folder, status))

    def event(self, event: PeerEvent) -> None:
        """Pass an event on."""
        event = replace(event, text=flags_as_keys(event.text))
        logger.log(logging.DEBUG if event.topic == "round" else logging.INFO, event_line(event))
        self._keep(lambda: append_event(self._folder, event))
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("on_event failed")

    def _keep(self, write: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # it is closed: a thread of the peer had something to say after the end
            self._files.submit(_warned, write)


def _warned(write: Callable[[], None]) -> None:
    try:
        write()
    except StateError as error:
        logger.warning("%s", error)


def _leave_at_exit(swarm: Swarm) -> None:
    """Have a swarm leave when the interpreter ends, if it has not left by then.

    `atexit` would be too late: executors take no work any more then, and leaving needs them to save. What is registered
    here runs before they end, for they were registered first.
    """
    found = weakref.ref(swarm)

    def leave() -> None:
        if (running := found()) is not None:
            running.leave()

    threading._register_atexit(leave)  # type: ignore[attr-defined]


def _settings_of(settings: AnySettings) -> PeerSettings:
    """Return the settings; the program may change its working directory later, and the peer stays where it is."""
    own = settings if isinstance(settings, PeerSettings) else load_settings(flags=settings, flags_source="settings")
    return own.model_copy(update={"state_directory": own.state_directory.absolute()})


def _listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
