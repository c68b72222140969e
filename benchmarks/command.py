"""The command line of the benchmarks. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import App

from p2p_diloco.cli.command_line import call_command, exit_code_of
from p2p_diloco.cli.flags import FiguresFlag
from p2p_diloco.cli.refusals import Refusals

PROGRAM = "python -m benchmarks"


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark and return its exit code."""
    return exit_code_of(PROGRAM, lambda: call_command(make_app(), arguments))


def make_app() -> App:
    """Return all benchmarks."""
    help_text = "Measure on this machine what an exchange, a join and training cost."
    bench = App(
        name=PROGRAM,
        help=help_text,
        help_format="plaintext",
        version_flags=[],
        config=Refusals(),
    )

    @bench.command
    def vectors(*, parameters: str = "1M", codec: str = "int4", repeat: int = 9, json: FiguresFlag = None) -> int:
        """Measure what each step of a cycle costs a core, with compiled loops and with NumPy alone.

        Parameters
        ----------
        parameters
            length of the vectors, like 1M
        codec
            int4, int8, bfloat16 or float32
        repeat
            measurements of each
        """
        from benchmarks.commands.vectors import VectorsOptions, bench_vectors

        return bench_vectors(VectorsOptions(codec=codec, parameters=parameters, repeat=repeat, json=json))

    @bench.command
    def averaging(
        *,
        peers: int = 4,
        parameters: str = "10M",
        codec: str = "int4",
        against: str = "hivemind,gloo",
        repeat: int = 5,
        spans: int | None = None,
        json: FiguresFlag = None,
    ) -> int:
        """Measure a whole exchange of real processes over libp2p, in turn with what others wrote for it.

        From pseudo-gradients in memory to the outer step applied at all peers: time, CPU and memory of all processes,
        bytes on the wire, and whether all end with the same bytes.

        Parameters
        ----------
        peers
            2 to 16, each a process with a libp2p daemon
        parameters
            length of the vector, like 10M
        codec
            of p2p_diloco's contributions and entries: int4, int8, bfloat16, float32; topk2 for contributions
        against
            hivemind (its averager, float32 and float16), gloo (torch.distributed, float32), both, or none
        repeat
            turns of each that count
        spans
            pieces in which p2p_diloco exchanges the vector; without it as many as `plan` recommends
        """
        from benchmarks.commands.averaging import AveragingOptions, bench_averaging

        options = AveragingOptions(
            peers=peers,
            parameters=parameters,
            codec=codec,
            against=against,
            spans=spans,
            repeat=repeat,
            json=json,
        )
        return bench_averaging(options)

    @bench.command
    def memory(*, peers: int = 4, parameters: str = "10M,50M,125M", json: FiguresFlag = None) -> int:
        """Measure what a peer holds in memory beyond the training itself: real peers that train and exchange.

        Beside them the same model is trained in a process of its own, which knows no swarm. The line through the sizes
        says how many bytes belong to each parameter, and how many are always there.

        Parameters
        ----------
        peers
            2 to 16, each a process with a libp2p daemon
        parameters
            of the models, one after the other, like 10M,50M
        """
        from benchmarks.commands.memory import MemoryOptions, bench_memory

        return bench_memory(MemoryOptions(peers=peers, parameters=parameters, json=json))

    @bench.command
    def state(
        *, megabytes: int = 800, donors: int = 3, killed: int = 1, repeat: int = 3, json: FiguresFlag = None
    ) -> int:
        """Measure how fast a newcomer gets the whole state from real processes over libp2p, some killed half-way.

        From the first word to all spans in place and their hashes compared with two donors: time, CPU and memory of
        all processes, how late the donors' loops came meanwhile, and whether all hold the same bytes.

        Parameters
        ----------
        megabytes
            length of the state, anchor and momentum, in millions of bytes
        donors
            1 to 16, each a process with a libp2p daemon
        killed
            donors that are killed when half of the bytes have come
        repeat
            transfers, each with processes of its own
        """
        from benchmarks.commands.state import StateOptions, bench_state

        return bench_state(StateOptions(megabytes=megabytes, donors=donors, killed=killed, repeat=repeat, json=json))

    @bench.command
    def training(
        *,
        islands: int = 4,
        uplink: str = "20mbit,unlimited",
        against: str = "blocking,torchft",
        codec: str = "int4",
        fragments: int = 1,
        spans: int | None = None,
        cycle_seconds: float = 0.0,
        repeat: int = 3,
        json: FiguresFlag = None,
    ) -> int:
        """Measure how much of its speed training keeps while islands exchange, beside systems that wait.

        Real processes train a model of 10M parameters on real text. Inner steps per second with the exchange are
        divided by those without it, in the same processes just before and after. The cycle is four times what its
        transmission takes by itself, so that the exchange cannot hide in a long one.

        Parameters
        ----------
        islands
            2 to 16, each a process of one thread with a libp2p daemon
        uplink
            what each island may send: 5mbit, 20mbit, 100mbit, unlimited; several with commas
        against
            own-loop (steps as Swarm.step makes them), blocking (waiting for each exchange), torchft (its DiLoCo over
            gloo), several with commas, or none
        codec
            of contributions and entries: int4, int8, bfloat16, float32; topk2 for contributions
        fragments
            parts of the model, exchanged in turn; rounds are shorter with several, and steps must fit into them
        spans
            pieces of each part; without it as many as `plan` recommends
        cycle_seconds
            another length of a cycle; 0: four times its own transmission
        repeat
            windows with the exchange, of each system on each line
        """
        from benchmarks.commands.training import TrainingOptions, bench_training

        options = TrainingOptions(
            islands=islands,
            uplink=uplink,
            against=against,
            codec=codec,
            fragments=fragments,
            spans=spans,
            cycle_seconds=cycle_seconds,
            repeat=repeat,
            json=json,
        )
        return bench_training(options)

    @bench.command
    def install_torchft() -> int:
        """Install torchft for `training`, into an environment of its own in this user's cache."""
        from benchmarks.commands.training import bench_install_torchft

        return bench_install_torchft()

    return bench
