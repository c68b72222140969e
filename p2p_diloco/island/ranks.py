"""The ranks of an island: one process each, all on `torch.distributed`. Rank 0 leads, the others follow its orders.

Orders and vectors travel on a gloo group of their own, in host memory, so training may use any backend. All messages
are between rank 0 and one other rank, so that rank 0 can name a rank that does not answer.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from p2p_diloco.errors import RANK_LOST_CODE, StateError

RANK_SECONDS = 60.0
"""Seconds that ranks wait for each other by default."""
FOREVER_SECONDS = 3.2e8
_ORDER_WORDS = 5
_PLACE = re.compile(r"\[/[^\]]*\] ?")


class OrderKind(IntEnum):
    """The kinds of orders that rank 0 gives to the others."""

    DONE = 0
    """The call is over; the text is its result."""
    FAILED = 1
    """The call has failed; the text is the error."""
    OVER = 2
    """Rank 0 has left the run."""
    WAIT = 3
    """Answer, to show that this rank is there."""
    PLAN = 4
    READ = 5
    WRITE = 6
    ADD = 7
    KEEP = 8
    SAMPLE = 9
    WHOLE = 10
    SAVE = 11
    LABEL = 12
    LOAD = 13
    RESTORE = 14
    TRAIN = 15
    """Build the model of a run; the text says which."""
    CLEAR = 16


class Order(NamedTuple):
    """An order of rank 0; the meaning of its numbers depends on its kind."""

    kind: OrderKind
    numbers: tuple[int, int, int] = (0, 0, 0)
    text: str = ""


class RankLost(StateError):
    """Another rank of this island has ended or does not answer, so the island ends."""

    exit_code = RANK_LOST_CODE


class Ranks:
    """Messages between rank 0 and the other ranks of the default process group. All ranks create it together.

    Args:
        timeout_seconds: how long rank 0 waits for another rank. The others wait twice as long for rank 0, so that it
            can say which rank is missing.
    Raises:
        RankLost: a rank does not take part in time.
    """

    def __init__(self, timeout_seconds: float = RANK_SECONDS) -> None:
        self.rank: int = dist.get_rank()
        self.count: int = dist.get_world_size()
        self.timeout_seconds = timeout_seconds
        self.lock = threading.RLock()
        """Held by rank 0 for an order and what belongs to it: two threads may give orders."""
        self.following = threading.Event()
        """Set on rank 0 while the other ranks follow its orders, which is during a call."""
        self._plan = ""
        try:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * timeout_seconds))
        except RuntimeError as error:
            raise RankLost(
                f"not all {self.count} ranks of this island have called the swarm within {2 * timeout_seconds:g} s "
                f"({first_sentence(error)}); call it on every rank"
            ) from None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def wait_at_most(self, seconds: float) -> None:
        self.timeout_seconds = min(self.timeout_seconds, seconds)

    @property
    def others(self) -> range:
        return range(1, self.count)

    # -- on rank 0

    def announce(self, plan: str) -> None:
        """Set the plan of the run, which the other ranks receive with the next order; callable from any thread."""
        with self.lock:
            self._plan = plan

    @contextmanager
    def order(self, kind: OrderKind, *numbers: int, text: str = "") -> Iterator[None]:
        """Send an order to the other ranks, and do what belongs to it inside the block.

        Outside of a call this waits for the next one, as the peer's thread may have to when a run is founded.
        """
        assert self.leads, "only rank 0 gives orders"
        with self._while_following():
            plan, self._plan = self._plan, ""
            for rank in self.others:
                if plan:
                    self.send_order(rank, OrderKind.PLAN, text=plan)
                self.send_order(rank, kind, *numbers, text=text)
            yield

    @contextmanager
    def _while_following(self) -> Iterator[None]:
        """Hold the lock within a call of all ranks; wait for one if there is none."""
        while True:
            if not self.following.wait(self.timeout_seconds):
                raise RankLost(
                    f"the ranks of this island have made no call for {self.timeout_seconds:g} s, so this island ends; "
                    "start all its ranks again to continue"
                )
            with self.lock:
                if self.following.is_set():  # otherwise the call has ended meanwhile
                    yield
                    return

    def send_order(
        self, rank: int, kind: OrderKind, *numbers: int, text: str = "", seconds: float | None = None
    ) -> None:
        """Send an order to one rank, which must receive it within some seconds if they are given."""
        encoded = text.encode()
        padded = (*numbers, *(0 for _ in range(_ORDER_WORDS - 2 - len(numbers))))
        self.send(torch.tensor([kind, *padded, len(encoded)], dtype=torch.int64), rank, seconds)
        self._send_bytes(encoded, rank)

    def check_present(self) -> None:
        """Ask all ranks for an answer.

        Raises:
            RankLost: one does not answer.
        """
        with self.order(OrderKind.WAIT):
            for rank in self.others:
                self.receive(torch.empty(1), rank)

    # -- on the other ranks

    def receive_order(self, *, patiently: bool = False) -> Order:
        """Wait for the next order of rank 0.

        Args:
            patiently: wait as long as rank 0 exists.
        """
        seconds = FOREVER_SECONDS if patiently else None
        words = self.receive(torch.empty(_ORDER_WORDS, dtype=torch.int64), 0, seconds).tolist()
        return Order(OrderKind(words[0]), (words[1], words[2], words[3]), self._receive_bytes(words[-1], 0).decode())

    # -- on all ranks

    def send(self, values: Tensor, rank: int, seconds: float | None = None) -> None:
        """Send a tensor in host memory to a rank.

        Args:
            seconds: maximum wait until the rank reads it; None: as for all messages.
        Raises:
            RankLost: the rank has ended, or does not read.
        """
        try:
            work = dist.isend(values, rank, group=self._group)
            assert work is not None, "every rank is in the group"
            work.wait(*([] if seconds is None else [timedelta(seconds=seconds)]))
        except RuntimeError as error:
            raise self._lost(rank, error) from None

    def meet(self, seconds: float) -> None:
        """Wait until all ranks call this, for at most that long.

        Raises:
            RankLost: one does not.
        """
        try:
            dist.monitored_barrier(self._group, timedelta(seconds=seconds))
        except RuntimeError as error:
            raise RankLost(
                f"a rank of this island has ended, or was not there after {seconds:g} s "
                f"({first_sentence(error)}), so this island ends; start all its ranks again to continue"
            ) from None

    def receive(self, into: Tensor, rank: int, seconds: float | None = None) -> Tensor:
        """Receive a tensor of the size and type of `into` from a rank, and return it.

        Args:
            seconds: maximum wait; None: as for all messages.
        Raises:
            RankLost: the rank has ended, or sends nothing in time.
        """
        patience = seconds or self.timeout_seconds * (1 if self.leads else 2)
        try:
            work = dist.irecv(into, rank, group=self._group)
            assert work is not None, "every rank is in the group"
            work.wait(timedelta(seconds=patience))
        except RuntimeError as error:
            raise self._lost(rank, error) from None
        return into

    def broadcast(self, values: Tensor) -> Tensor:
        """Send a tensor in host memory from rank 0 to all others, which receive it in `values`; return it."""
        try:
            dist.broadcast(values, 0, group=self._group)
        except RuntimeError as error:
            raise self._lost(0, error) from None
        return values

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks by rank, on rank 0; an empty list on the others."""
        if self.leads:
            return [text, *(self._receive_text(rank) for rank in self.others)]
        encoded = text.encode()
        self.send(torch.tensor([len(encoded)]), 0)
        self._send_bytes(encoded, 0)
        return []

    def _receive_text(self, rank: int) -> str:
        size = int(self.receive(torch.empty(1, dtype=torch.int64), rank))
        return self._receive_bytes(size, rank).decode()

    def _send_bytes(self, encoded: bytes, rank: int) -> None:
        if encoded:
            self.send(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), rank)

    def _receive_bytes(self, size: int, rank: int) -> bytes:
        return self.receive(torch.empty(size, dtype=torch.uint8), rank).numpy().tobytes() if size else b""

    def _lost(self, rank: int, error: RuntimeError) -> RankLost:
        patience = self.timeout_seconds * (1 if self.leads else 2)
        text = str(error).lower()
        who = f"rank {rank} of this island" if self.leads and rank else "rank 0 of this island"
        if self.leads and not rank:
            who = "another rank of this island"
        is_late = "timed out" in text or "timeout" in text
        what = f"did not answer within {patience:g} s" if is_late else "has ended"
        return RankLost(f"{who} {what}, so this island ends; start all its ranks again to continue")


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether an error comes from the exchange between ranks, and not from the computation of this one."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "connection"))


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error of PyTorch, without the place in its source."""
    return _PLACE.sub("", str(error).partition(". ")[0])
