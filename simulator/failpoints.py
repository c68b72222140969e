"""Failpoints: places in the shipped code where the process that reaches them first is killed or stopped.

The shipped code does not know of them. While a failpoint is armed, it replaces one function of that code by a wrapper
that looks at the machine whose process is running. A killed process ends right there: the call never returns, and its
disk is kept as it was at that moment. A stopped process sends nothing until it continues; then it sends, late, what it
was about to send. It may finish the function that it is in, since no other peer can see its memory or its disk.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_diloco.protocol.wire.messages import Message, decode_message
from p2p_diloco.transport.link import whole
from simulator.machine import Machine
from simulator.mistakes import replaced
from simulator.network import SimulatedTransport
from simulator.process import OUTSIDE, current_process, run_in
from simulator.simulation import Simulation

LATEST_SECONDS = 0.05
"""Time for which a message of a process that continues is still useful, as in `SwarmNode`."""
DRAFT_SUFFIX = ".part"


class Kind(enum.Enum):
    """The kind of failure of a process."""

    KILLED = "killed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that a wrapper has intercepted.

    Attributes:
        machine: the machine whose process makes the call.
        arguments: its positional arguments, without `self`.
        message: what is sent, if the call sends a message; `arguments` then begins with the receiver.
    """

    swarm: Simulation
    machine: Machine
    arguments: tuple[Any, ...]
    message: Message | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failpoint:
    """One place.

    Attributes:
        owner, name: the class or module that holds the function, and the function's name.
        counts: whether a call is one that the failpoint is about.
        nth: which of these calls of one machine in one round it is.
        is_after: whether the process fails after the call instead of before it.
        is_torn: whether a killed process leaves half of the file that the call has written.
    """

    owner: Any
    name: str
    counts: Callable[[Call], bool]
    nth: int = 1
    is_after: bool = False
    is_torn: bool = False


class _Crashed(asyncio.CancelledError):
    """Unwinds a process that has been killed; no `except Exception` of the shipped code catches it."""


class ArmedFailpoint:
    """A failpoint that waits for the first machine to reach it.

    Attributes:
        machine: the machine that has reached it, or None.
        disk: files of a killed machine at that moment.
    """

    def __init__(self, swarm: Simulation, point: Failpoint, kind: Kind) -> None:
        self.machine: Machine | None = None
        self.disk: dict[Path, bytes] = {}
        self._swarm = swarm
        self._point = point
        self._kind = kind
        self._counted: dict[tuple[str, int], int] = {}
        self._held: list[Callable[[], object]] = []

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Replace the function inside the block."""
        point = self._point
        with ExitStack() as stack:
            stack.enter_context(replaced(SimulatedTransport, "_hand_over", self._unwinding()))
            stack.enter_context(replaced(SimulatedTransport, "post", self._sending()))
            if point.owner is not SimulatedTransport:
                stack.enter_context(replaced(point.owner, point.name, self._calling()))
            yield

    def go_on(self) -> None:
        """Let the stopped machine continue; what it was about to send goes out first."""
        assert self.machine is not None, "no machine has reached the failpoint"
        self._swarm.go_on(self.machine.name)
        held, self._held = self._held, []
        if self.machine.process is not None:
            for post in held:
                run_in(self.machine.process, post)

    def start(self) -> None:
        """Start the killed machine again, on the disk that it had."""
        assert self.machine is not None, "no machine has reached the failpoint"
        self._swarm.restore(self.machine.name, self.disk, is_lost=False)
        self._swarm.start(self.machine.name)

    # -- wrappers

    def _unwinding(self) -> Callable[..., Any]:
        right = SimulatedTransport._hand_over

        def hand_over(transport: SimulatedTransport, *arguments: Any) -> str | None:
            try:
                return right(transport, *arguments)
            except _Crashed:
                return None  # the receiver has been killed by this frame; the network goes on

        return hand_over

    def _sending(self) -> Callable[..., Any]:
        right, point = SimulatedTransport.post, self._point

        def post(transport: SimulatedTransport, peer: bytes, frame: Any, *, lane: Any, deadline: float) -> bool:
            def send(until: float) -> bool:
                return right(transport, peer, frame, lane=lane, deadline=until)  # type: ignore[arg-type]

            def send_late() -> bool:
                return send(max(deadline, asyncio.get_running_loop().time() + LATEST_SECONDS))

            is_mine = point.owner is SimulatedTransport and self._is_awaited()
            machine = self._machine_running() if is_mine or self._holds(transport) else None
            if machine is not None and is_mine:
                call = Call(swarm=self._swarm, machine=machine, arguments=(peer,), message=decode_message(whole(frame)))
                if self._is_it(call):
                    if point.is_after:
                        self.machine = machine  # no other machine may reach it meanwhile
                        self._swarm.loop.call_soon(self._fail, machine, context=OUTSIDE)
                        return send(deadline)
                    self._strike(machine)
            if self._holds(transport):
                self._held.append(send_late)
                return True
            return send(deadline)

        return post

    def _calling(self) -> Callable[..., Any]:
        right, point = getattr(self._point.owner, self._point.name), self._point
        is_method = isinstance(point.owner, type)

        def call(*arguments: Any, **more: Any) -> Any:
            machine = self._machine_running() if self._is_awaited() else None
            seen = arguments[1:] if is_method else arguments
            if machine is None or not self._is_it(Call(swarm=self._swarm, machine=machine, arguments=seen)):
                return right(*arguments, **more)
            if not point.is_after and not point.is_torn:
                self._strike(machine)
                return right(*arguments, **more)
            result = right(*arguments, **more)
            self._strike(machine)
            return result

        return call

    # -- failing

    def _is_awaited(self) -> bool:
        return self.machine is None and self._swarm.broken is None

    def _holds(self, transport: SimulatedTransport) -> bool:
        return (
            self._kind is Kind.STOPPED
            and self.machine is not None
            and self.machine.transport is transport
            and self.machine.is_stopped
        )

    def _machine_running(self) -> Machine | None:
        process = current_process()
        if process is None or process.is_dying:
            return None
        return next((machine for machine in self._swarm.machines.values() if machine.process is process), None)

    def _is_it(self, call: Call) -> bool:
        if not self._point.counts(call):
            return False
        key = (call.machine.name, self._swarm.round)
        self._counted[key] = self._counted.get(key, 0) + 1
        return self._counted[key] == self._point.nth

    def _strike(self, machine: Machine) -> None:
        """Fail inside a call of the process; of a killed one, the call ends here."""
        self._fail(machine)
        if self._kind is Kind.KILLED:
            raise _Crashed

    def _fail(self, machine: Machine) -> None:
        self.machine = machine
        if self._kind is Kind.STOPPED:
            self._swarm.stop(machine.name)
            return
        self.disk = self._swarm.snapshot(machine.name)
        if self._point.is_torn:
            self.disk = {path: _torn(path, content) for path, content in self.disk.items()}
        self._swarm.kill(machine.name)


def _torn(path: Path, content: bytes) -> bytes:
    return content[: len(content) // 2] if path.name.endswith(DRAFT_SUFFIX) else content
