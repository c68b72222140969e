"""An island of several ranks: calls of the swarm that all ranks make together, and models that they hold alike.

Rank 0 is the peer: it talks to the swarm and decides. In each call the others first report to it, then follow its
orders until the call is over. A rank that ends or does not answer ends the island.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from p2p_diloco.errors import ConfigError, DaemonEnded, NetworkError, P2PDilocoError, StateError
from p2p_diloco.ids import sha256
from p2p_diloco.island.inner_state import InnerState, Stateful
from p2p_diloco.island.rank_parameters import RankParameters, gather_tensor
from p2p_diloco.island.ranks import Order, OrderKind, RankLost, Ranks, first_sentence, is_lost_connection
from p2p_diloco.island.shards import is_sharded, local_part
from p2p_diloco.outer.fragments import Fragment, TensorSlot

_Built = TypeVar("_Built")

LEAVE, TURN = "leave", "turn"
CALLS = ("step", "ready", "progress", "seed", "anchor", "save", "export", LEAVE, "wait", "new_run", TURN, "batch_scale")
THE_END = "end"
"""The result of the last turn of the built-in trainer in a session."""
HURRY_SECONDS = 5.0
"""Maximum wait for the other ranks after an exception: they may wait for this rank in a backward pass."""
MOST_DRIFT = 1e-3
"""Replicas count as different if their sampled parameters differ by more than this share of their length. Rounding
differs by less; ranks that train without exchanging gradients differ by more within a few steps."""
SAMPLED = 4096
BUILD_SECONDS = 1800.0
"""Maximum time until all ranks have built a model, for which they may read its weights from a disk."""
_REPORT_WORDS = 5
"""All reports have the same length, so that a rank that makes another call is recognised."""
_ERRORS: Mapping[str, type[P2PDilocoError]] = {
    kind.__name__: kind for kind in (P2PDilocoError, ConfigError, NetworkError, DaemonEnded, StateError, RankLost)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """The model of this rank, the objects whose state it saves, and where."""

    model: nn.Module
    tensors: Mapping[str, Tensor]
    kept: Mapping[str, Stateful]
    state_directory: Path


class Island:
    """The ranks of an island, as one of them sees it. For the training thread, unless noted otherwise.

    Attributes:
        is_over: rank 0 has left the run, or the island has failed.
        lost: why the island has ended: a rank is missing.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.is_over = False
        self.lost: RankLost | None = None
        self._on_lost: Callable[[], None] = lambda: None
        self._planned: tuple[RankParameters, InnerState] | None = None
        self._trained: _Trained | None = None
        self._asked_at = 0.0

    @property
    def leads(self) -> bool:
        return self.ranks.leads

    def attach(
        self, model: nn.Module, tensors: Mapping[str, Tensor], kept: Mapping[str, Stateful], state_directory: Path
    ) -> None:
        """Name what this rank trains, the objects whose state it saves, and where."""
        self._trained = _Trained(model=model, tensors=tensors, kept=kept, state_directory=state_directory)

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call this once on rank 0 when a rank is missing."""
        self._on_lost = call

    def give_up(self) -> None:
        self.is_over = True

    # -- calls

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the block on all ranks; if it fails on one, all raise its error.

        Raises:
            P2PDilocoError: the error of the first rank that failed.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
        reported = self.ranks.gather_texts(_as_text(error, self.ranks.rank))
        if self.leads:
            failed = [(rank, text) for rank, text in enumerate(reported) if text]
            outcome = "" if not failed else _of_rank(*failed[0])
            for rank in self.ranks.others:
                self.ranks.send_order(rank, OrderKind.FAILED if outcome else OrderKind.DONE, text=outcome)
        else:
            outcome = self.ranks.receive_order().text
        if error is not None and not isinstance(error, P2PDilocoError):
            raise error
        if outcome:
            raise _from_text(outcome)

    def call(self, name: str, work: Callable[[list[list[float]]], Any], numbers: Sequence[float] = ()) -> Any:
        """Make a call of the swarm together with the other ranks, and return its result, which is the same on all.

        Args:
            name: one of `CALLS`; all ranks must make the same call.
            work: does the work on rank 0, given what each rank reports; what it returns is sent as JSON.
            numbers: what this rank reports, at most four.
        Returns:
            The result; None on the other ranks if rank 0 has left the run.
        Raises:
            RankLost: a rank has ended or does not answer; this island has ended.
            P2PDilocoError: the work failed; all ranks raise this.
        """
        if self.lost is not None:
            raise self.lost
        report = torch.zeros(_REPORT_WORDS, dtype=torch.float64)
        report[: 1 + len(numbers)] = torch.tensor([CALLS.index(name), *numbers], dtype=torch.float64)
        try:
            return self._lead(name, work, report) if self.leads else self._report_and_follow(report)
        except RankLost as lost:
            self.end(lost)
            raise

    def hurry(self) -> None:
        """Wait for other ranks for seconds only from now on: an exception has ended the loop of this rank."""
        self.ranks.wait_at_most(HURRY_SECONDS)

    def wait(self, event: Event, seconds: float) -> bool:
        """Wait on rank 0 until an event is set, while the other ranks are asked now and then whether they are there."""
        until = time.monotonic() + seconds
        pause = min(1.0, self.ranks.timeout_seconds / 4)
        while not event.wait(max(0.0, min(pause, until - time.monotonic()))):
            if time.monotonic() >= until:
                return False
            self.check_present()
        return True

    def check_present(self) -> None:
        """Ask the other ranks whether they are there, at most once in a while; on rank 0, during a call."""
        if time.monotonic() - self._asked_at >= min(1.0, self.ranks.timeout_seconds / 4):
            self._asked_at = time.monotonic()
            self.ranks.check_present()

    def _lead(self, name: str, work: Callable[[list[list[float]]], Any], report: Tensor) -> Any:
        ranks = self.ranks
        try:
            reports = [report.tolist(), *(self._report_of(rank, report) for rank in ranks.others)]
        except RankLost:
            if name == LEAVE:
                return self._leave_alone(work)
            raise
        calls = [CALLS[int(words[0])] for words in reports]
        if name == LEAVE and set(calls) != {LEAVE}:
            return self._leave_alone(work)
        other = next((rank for rank, call in enumerate(calls) if call != name), None)
        if other is not None:
            lost = RankLost(
                f"rank {other} of this island called {calls[other]} while rank 0 called {name}, so this island ends; "
                "make the same calls of the swarm on all ranks, in the same order"
            )
            self._tell_others(lost)
            raise lost
        ranks.following.set()
        result, error = None, None
        try:
            result = work([words[1:] for words in reports])
        except BaseException as raised:
            error = raised
        with ranks.lock:  # an order of another thread may be under way
            ranks.following.clear()
        if error is not None:
            self._tell_others(error)
            raise error
        text = "" if isinstance(result, bool) else json.dumps(result)
        for rank in ranks.others:
            ranks.send_order(rank, OrderKind.DONE, int(result is True), text=text)
        return result

    def _leave_alone(self, work: Callable[[list[list[float]]], Any]) -> Any:
        """Leave without the other ranks, because an exception or Ctrl-C has ended the loop of rank 0 but not theirs."""
        for rank in self.ranks.others:
            with suppress(RankLost):
                self.ranks.send_order(rank, OrderKind.OVER)
        self.is_over = True
        return work([])

    def _report_of(self, rank: int, like: Tensor) -> list[float]:
        words: list[float] = self.ranks.receive(torch.empty_like(like), rank).tolist()
        return words

    def _tell_others(self, error: BaseException) -> None:
        """Send an error to all ranks that can still be reached."""
        for rank in self.ranks.others:
            with suppress(RankLost):
                self.ranks.send_order(rank, OrderKind.FAILED, text=_as_text(error))

    def end(self, lost: RankLost) -> None:
        """End this island because a rank is missing."""
        self.lost, self.is_over = lost, True
        self._on_lost()

    def _report_and_follow(self, report: Tensor) -> Any:
        self.ranks.send(report, 0)
        while True:
            order = self.ranks.receive_order()
            match order.kind:
                case OrderKind.DONE:
                    return bool(order.numbers[0]) if not order.text else json.loads(order.text)
                case OrderKind.FAILED:
                    raise _from_text(order.text)
                case OrderKind.OVER:
                    self.is_over = True
                    return None
                case _:
                    self._follow(order)

    # -- orders

    def _follow(self, order: Order) -> None:
        ranks = self.ranks
        match order.kind:
            case OrderKind.WAIT:
                ranks.send(torch.zeros(1), 0)
            case OrderKind.PLAN:
                own, plan = self._trained, json.loads(order.text)
                assert own is not None, "attach a model first"
                parameters = RankParameters(own.model, own.tensors, _fragments_of(plan["fragments"]), ranks)
                inner = InnerState(own.state_directory / plan["folder"], own.kept, rank=ranks.rank)
                self._planned = parameters, inner
            case OrderKind.SAMPLE:
                sample = self._sample()
                assert sample is not None, "all ranks shard the same tensors"
                ranks.send(sample, 0)
            case OrderKind.WHOLE:
                assert self._trained is not None, "attach a model first"
                gather_tensor(self._trained.model.state_dict()[order.text], ranks)
            case OrderKind.SAVE:
                ranks.gather_texts(_save_inner(self._inner, order.text))
            case OrderKind.CLEAR:
                self._inner.clear()
            case OrderKind.LABEL:
                ranks.gather_texts(json.dumps(_outcome(self._inner.label)))
            case OrderKind.LOAD:
                ranks.gather_texts(_outcome(self._inner.load)[1])
            case _:
                self._parameters.follow(order)

    @property
    def _parameters(self) -> RankParameters:
        assert self._planned is not None, "the plan comes first"
        return self._planned[0]

    @property
    def _inner(self) -> InnerState:
        assert self._planned is not None, "the plan comes first"
        return self._planned[1]

    def restore(self) -> None:
        """Set θ of this rank, which is not rank 0, to its latest copy; see `LocalParameters.keep`."""
        self._parameters.restore()

    def whole_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return all tensors of the model's `state_dict` in host memory; on rank 0, during a call."""
        found = {}
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, Tensor) and is_sharded(tensor):
                with self.ranks.order(OrderKind.WHOLE, text=name):
                    whole = gather_tensor(tensor, self.ranks)
                    assert whole is not None, "this is rank 0"
                    found[name] = whole
            elif isinstance(tensor, Tensor):
                found[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return found

    # -- the built-in trainer

    def order_training(self, text: str) -> None:
        """On rank 0, outside of calls: order the other ranks to build a model; the text has what they need for it."""
        for rank in self.ranks.others:
            self.ranks.send_order(rank, OrderKind.TRAIN, text=text)

    def await_training(self) -> str | None:
        """Return the text of the next `order_training`; None once rank 0 has left. It may search its run for hours."""
        order = self.ranks.receive_order(patiently=True)
        if order.kind == OrderKind.TRAIN:
            return order.text
        self.is_over = True
        return None

    def build(self, work: Callable[[], _Built]) -> _Built:
        """Return what `work` returns on this rank; all ranks call this, and all raise the first error of one.

        Raises:
            P2PDilocoError: the error.
        """
        built = None
        with self.together():
            try:
                built = work()
            finally:
                self.ranks.meet(BUILD_SECONDS)
        assert built is not None, "an error would have been raised"
        return built

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """End this island if the ranks cannot exchange gradients inside the block.

        Raises:
            RankLost: they could not.
        """
        try:
            yield
        except RankLost as lost:
            self.end(lost)
            raise
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise  # it would fail again
            failed = RankLost(
                f"a step of the ranks of this island failed ({first_sentence(error)}), so this island ends; "
                "start all its ranks again to continue"
            )
            self.end(failed)
            raise failed from error

    def close(self) -> None:
        """On rank 0, outside of calls: let the other ranks end, which wait in `await_training`.

        If they do not, because this rank has failed elsewhere, they notice its end.
        """
        if self.lost is None and not self.is_over:
            self.is_over = True
            for rank in self.ranks.others:
                with suppress(RankLost):
                    self.ranks.send_order(rank, OrderKind.OVER, seconds=HURRY_SECONDS)

    # -- replicas

    def check_replicas(self) -> None:
        """Check that parameters that all ranks hold are still equal, up to rounding; on rank 0, during a call.

        Raises:
            ConfigError: they are not, so the ranks do not exchange their gradients.
        """
        own = self._sample()
        if own is None:
            return
        with self.ranks.order(OrderKind.SAMPLE):
            others = [self.ranks.receive(torch.empty_like(own), rank) for rank in self.ranks.others]
        for rank, other in enumerate(others, 1):
            apart, length = (other - own).norm(), own.norm()
            if apart > MOST_DRIFT * length:
                raise ConfigError(
                    f"the parameters of rank {rank} differ from those of rank 0 by {float(apart / length):.1%}, so the "
                    "ranks do not exchange their gradients; wrap the model in DistributedDataParallel, or shard it "
                    "with fully_shard"
                )

    def _sample(self) -> Tensor | None:
        """Return some elements of the first trained tensor that all ranks hold; None if there is none."""
        tensors = self._trained.tensors.values() if self._trained is not None else ()
        whole = (tensor for tensor in tensors if not is_sharded(tensor))
        first = next(whole, None)
        return local_part(first).flatten()[:SAMPLED].cpu() if first is not None else None


class RankInner(InnerState):
    """Saves and restores the private state of all ranks together: each writes its own file.

    Files of different saves do not fit together: replicas would drift apart. So all ranks load, or none. On rank 0,
    during a call.
    """

    def __init__(self, ranks: Ranks, folder: Path, parts: Mapping[str, Stateful]) -> None:
        super().__init__(folder, parts)
        self._ranks = ranks

    def save(self, label: str) -> None:
        label = f"{label} of {self._ranks.count}"
        with self._ranks.order(OrderKind.SAVE, text=label):
            _raise_first(self._ranks.gather_texts(_outcome(super().save, label)[1]))

    def load(self) -> str | None:
        """Restore the state of all ranks and return its label; None if no rank has a file."""
        ranks = self._ranks
        with ranks.order(OrderKind.LABEL):
            found = [json.loads(text) for text in ranks.gather_texts(json.dumps(_outcome(self.label)))]
        _raise_first([text for _, text in found])
        labels = [label for label, _ in found]
        if not any(labels):
            return None
        if set(labels) != {labels[0]} or not labels[0].endswith(f" of {ranks.count}"):
            raise StateError(
                f"the states saved by the ranks of this island do not belong together, or another number than "
                f"{ranks.count} saved them; these are reset: {', '.join(self.names)}"
            )
        with ranks.order(OrderKind.LOAD):
            texts = ranks.gather_texts(_outcome(super().load)[1])
        if any(texts):
            self.clear()
        _raise_first(texts)
        return str(labels[0])

    def clear(self) -> None:
        """Let the optimisers of all ranks begin anew."""
        with self._ranks.order(OrderKind.CLEAR):
            super().clear()


def _outcome(work: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Return what `work` returns, and an empty text; or None and the text of its StateError."""
    try:
        return work(*arguments), ""
    except StateError as error:
        return None, str(error)


def _raise_first(texts: Sequence[str]) -> None:
    for rank, text in enumerate(texts):
        if text:
            raise StateError(f"rank {rank}: {text}")


def _save_inner(inner: InnerState, label: str) -> str:
    """Save the private state of a rank; return why that failed, or an empty text."""
    with suppress(OSError):  # saving reports it; on another machine than rank 0's, nothing has made the folder yet
        inner.folder.mkdir(parents=True, exist_ok=True)
    return str(_outcome(inner.save, label)[1])


def _as_text(error: BaseException | None, rank: int = 0) -> str:
    """Return an error as JSON for another rank; an empty text without an error."""
    if error is None:
        return ""
    if isinstance(error, P2PDilocoError):
        return json.dumps([type(error).__name__, str(error)])
    reason = f": {error}" if str(error) else ""
    return json.dumps(["StateError", f"rank {rank} of this island failed with {type(error).__name__}{reason}"])


def _of_rank(rank: int, text: str) -> str:
    """Return the text of an error that names its rank."""
    kind, message = json.loads(text)
    return json.dumps([kind, message if not rank or message.startswith("rank ") else f"rank {rank}: {message}"])


def _from_text(text: str) -> P2PDilocoError:
    kind, message = json.loads(text)
    return _ERRORS.get(kind, StateError)(message)


def _fragments_of(tensors: list[list[tuple[str, int]]]) -> list[Fragment]:
    fragments = []
    for index, listed in enumerate(tensors):
        slots, start = [], 0
        for name, elements in listed:
            slots.append(TensorSlot(name=name, elements=elements, start=start))
            start += elements
        fragments.append(Fragment(index=index, tensors=tuple(slots), elements=start))
    return fragments


def plan_text(fragments: Sequence[Fragment], folder: str) -> str:
    """Return the plan of a run for the other ranks: the tensors of each fragment, and the name of the run's folder."""
    tensors = [[[slot.name, slot.elements] for slot in fragment.tensors] for fragment in fragments]
    return json.dumps({"fragments": tensors, "folder": folder})


class RankModels:
    """The models of all ranks of an island, compared; rank 0 keeps what it needs to compare them with the run.

    All ranks make the same calls.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._rest: list[dict[str, bytes]] = []

    def compare_tables(self, tensors: Mapping[str, Tensor], rest: Iterator[tuple[str, Tensor]]) -> None:
        """Check on rank 0 that all ranks have tensors of the same names and shapes.

        Raises:
            ConfigError: they have not.
        """
        table = {
            kind: {name: f"{tuple(tensor.shape)}{' in shards' if is_sharded(tensor) else ''}" for name, tensor in named}
            for kind, named in (("train", tensors.items()), ("hold", rest))
        }
        for rank, text in enumerate(self._ranks.gather_texts(json.dumps(table))):
            for kind, others in json.loads(text).items():
                for name in dict.fromkeys((*table[kind], *others)):
                    own, other = table[kind].get(name), others.get(name)
                    if own != other:
                        raise ConfigError(
                            f"rank {rank} does not {kind} the same tensors as rank 0: {name} is "
                            f"{_of_shape(other)} there and {_of_shape(own)} on rank 0; build the same model on all "
                            "ranks"
                        )

    def compare_values(self, tensors: Mapping[str, Tensor], rest: Mapping[str, bytes]) -> None:
        """Check on rank 0 that all ranks hold the same values of trained tensors that are not sharded.

        Raises:
            ConfigError: they do not.
        """
        whole = {name: local_part(tensor) for name, tensor in tensors.items() if not is_sharded(tensor)}
        parts = {name: described(name, tensor).hex() for name, tensor in whole.items()}
        reported = {"trained": parts, "rest": {name: part.hex() for name, part in rest.items()}}
        others = [json.loads(text) for text in self._ranks.gather_texts(json.dumps(reported))]
        for rank, other in enumerate(others):
            differs = next((name for name, part in parts.items() if other["trained"][name] != part), None)
            if differs is not None:
                raise ConfigError(
                    f"parameter {differs} has other values on rank {rank} than on rank 0; start all ranks from the "
                    "same values, for example by wrapping the model in DistributedDataParallel before it joins"
                )
        self._rest = [{name: bytes.fromhex(part) for name, part in other["rest"].items()} for other in others]

    def rest(self, ignored: Sequence[str]) -> dict[str, bytes]:
        """Return the names and digests of rank 0's frozen tensors and buffers, if those of all ranks are equal.

        Args:
            ignored: names of those that may differ.
        Raises:
            ConfigError: they differ.
        """
        own = {name: part for name, part in self._rest[0].items() if name not in ignored}
        for rank, other in enumerate(self._rest):
            # Shards are gathered on rank 0, so the others have no digest of them.
            differs = next((name for name, part in own.items() if other[name] and other[name] != part), None)
            if differs is not None:
                raise ConfigError(
                    f"tensor {differs}, which is not trained, has other values on rank {rank} than on rank 0; load "
                    "the same model on all ranks"
                )
        return own


def _of_shape(shape: str | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


def described(name: str, tensor: Tensor) -> bytes:
    """Return a line with name, type and shape of a tensor, and the digest of its bytes."""
    value = tensor.detach().cpu().contiguous()
    line = f"{name} {value.dtype} {tuple(value.shape)}\n".encode()
    return line + (sha256(value.flatten().view(torch.uint8).numpy().tobytes()) if value.numel() else b"")
