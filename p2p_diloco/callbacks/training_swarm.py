"""The swarm of one training in another project's loop: entered when the training begins, left when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from p2p_diloco.api import AnySettings, OnEvent, Swarm, found, join
from p2p_diloco.config.invite import is_invite, parse_invite
from p2p_diloco.errors import ConfigError, StateError

Enter = Callable[..., Swarm]
"""Called with a model, a list of optimisers, and the keywords `until_round` and `on_event`."""
Holds = Literal["shared", "own", "as it is"]


class TrainingSwarm:
    """Holds at most one swarm at a time, that of the training that runs; the arguments are those of its callbacks."""

    def __init__(
        self,
        run: str | Path | Enter,
        *,
        settings: AnySettings = None,
        timeout: float | None = None,
        until_round: int | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        enter = _enter(run, settings, timeout)
        self._enter = partial(enter, until_round=until_round, on_event=on_event)
        self._swarm: Swarm | None = None
        self._membership = ExitStack()
        self._shown = ExitStack()

    @property
    def swarm(self) -> Swarm:
        """The swarm of the training that runs, or of the last one.

        Raises:
            StateError: no training has begun.
        """
        if self._swarm is None:
            raise StateError("there is no swarm before the training begins; use it from the first step on")
        return self._swarm

    def begin(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, remedy: str) -> None:
        """Enter the run, and return once the model holds its state. A training that broke off is left first.

        Args:
            remedy: how to get float32 parameters, in the words of the project.
        Raises:
            ConfigError: the run, the model or the settings are invalid.
            NetworkError: no peer answered in time.
        """
        self.abandon()
        _check_precision(model, remedy)
        self._swarm = self._membership.enter_context(self._enter(model, list(optimizers)))

    def show_shared(self) -> None:
        """Load the shared state into the model until `hide_shared`."""
        self._shown.enter_context(self.swarm.anchor())

    def hide_shared(self) -> None:
        """Restore this peer's own parameters."""
        self._shown.close()

    def end(self, model: nn.Module, holds: Holds) -> None:
        """Leave the run.

        Args:
            holds: what the model holds afterwards: the shared state, this peer's own parameters, or what it holds now.
        Raises:
            P2PDilocoError: the peer has failed.
        """
        held = _copies(model) if holds == "as it is" else None
        self.hide_shared()
        self._membership.close()
        if holds == "shared":
            with self.swarm.anchor():
                held = _copies(model)
        if held is not None:
            with torch.no_grad():
                for parameter, value in zip(_trained(model), held, strict=True):
                    parameter.copy_(value)

    def abandon(self) -> None:
        """Leave the run of a training that broke off, in at most about 15 seconds; the model keeps its parameters."""
        self.hide_shared()
        if self._swarm is not None:
            self._swarm.leave()
        self._membership.pop_all()


def _enter(run: str | Path | Enter, settings: AnySettings, timeout: float | None) -> Enter:
    if callable(run):
        if settings is not None or timeout is not None:
            raise ConfigError("settings and timeout have no effect on a function that enters a run; give them to it")
        return run
    if is_invite(str(run)):
        parse_invite(str(run))
        return partial(join, str(run), settings=settings, timeout=timeout)
    if not Path(run).is_file():
        raise ConfigError(
            f'"{run}" is neither an invite (p2pdiloco://…) nor a run file; to begin a run, create its file with '
            f'p2p_diloco.new_run("{run}", model)'
        )
    return partial(found, run, settings=settings)


def _check_precision(model: nn.Module, remedy: str) -> None:
    """Refuse a model that was loaded in half precision, with the project's own remedy."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ConfigError(
                f"parameter {name} is {kind}; trained parameters must be float32, because an update of 1e-5 does not "
                f"change a {kind} of 0.03; {remedy}"
            )


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in _trained(model)]
