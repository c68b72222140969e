"""Scalars of one peer for TensorBoard: one point per round, so that curves of peers and restarts line up.

TensorBoard is imported only by a peer that writes scalars, in the thread that writes them. A slow disk costs points,
never time of the peer.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.reporter import PeerObserver
from p2p_diloco.status.status_file import PeerStatus
from p2p_diloco.wording import install_line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 10
logger = logging.getLogger("p2p_diloco")


def scalars_of(status: PeerStatus) -> dict[str, float]:
    """Return the scalars of a status by name, without those that are not known."""
    trains = status.role == "trainer"
    values: dict[str, float | None] = {
        "train/loss": status.loss or None,  # 0.0: the loop has given none yet
        "train/tokens_per_second": status.tokens_per_second if trains else None,
        "train/tokens": status.tokens if trains else None,
        "train/steps": status.inner_steps if trains else None,
        "eval/loss": status.anchor_loss,
        "eval/loss_local": status.local_loss,
        "swarm/members": status.num_members,
        "swarm/ready": status.num_ready,
        "swarm/participation": status.participation,
        "swarm/entries": status.entries_absorbed,
        "swarm/share_done": status.share_done,
        "swarm/bytes_sent": status.bytes_sent.total,
        "swarm/bytes_received": status.bytes_received.total,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


@contextmanager
def with_tensorboard(folder: Path | None, observer: PeerObserver) -> Iterator[PeerObserver]:
    """Yield an observer that also writes scalars into `folder`; without a folder, the given one.

    Raises:
        ConfigError: the package tensorboard is not installed.
        StateError: the folder cannot be created.
    """
    if folder is None:
        yield observer
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            f"--tensorboard {folder} needs the package tensorboard, which is not installed; install it with "
            f"{install_line('track')}, or remove --tensorboard"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"cannot create {folder}: {error.strerror}; name another folder with --tensorboard") from None
    with _ScalarWriter(folder, observer) as writer:
        yield writer


class _ScalarWriter:
    """Passes everything on to an observer, and writes the scalars of the first status of each round."""

    def __init__(self, folder: Path, observer: PeerObserver) -> None:
        self._observer = observer
        self._folder = folder
        self._round = -1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensorboard")
        self._last: Future[None] | None = None
        self._writer: SummaryWriter | None = None
        self._failed = False

    def __enter__(self) -> _ScalarWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._close)
        self._thread.shutdown()

    def listening(self, invite: str, *, own_model: bool) -> None:
        self._observer.listening(invite, own_model=own_model)

    def status(self, status: PeerStatus) -> None:
        """Pass on a status, and write its scalars if it is the first of its round."""
        self._observer.status(status)
        if status.round <= self._round or self._failed:
            return
        self._round = status.round
        if self._last is None or self._last.done():  # otherwise the disk is slow, and this round gets no point
            self._last = self._thread.submit(self._write, status)

    def event(self, event: PeerEvent) -> None:
        self._observer.event(event)

    def _write(self, status: PeerStatus) -> None:
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._folder), flush_secs=FLUSH_SECONDS)
            for name, value in scalars_of(status).items():
                self._writer.add_scalar(name, value, global_step=status.round, walltime=status.updated)
        except Exception as error:
            self._failed = True
            logger.warning("cannot write scalars to %s: %s; the peer continues without them", self._folder, error)

    def _close(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        except Exception as error:
            logger.warning("cannot write scalars to %s: %s", self._folder, error)
