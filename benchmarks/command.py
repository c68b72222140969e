"""Command line of the benchmarks. Heavy modules are imported only when a benchmark runs."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import App

from p2p_diloco.app.cli.command_line import call_command, check_typed, exit_code_of
from p2p_diloco.app.cli.options import FiguresFlag

PROGRAM = "python -m benchmarks"


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark and return its exit code."""
    return exit_code_of(PROGRAM, lambda: call_command(make_app(), arguments))


def make_app() -> App:
    """Return the app with all benchmark commands."""
    help_text = "Measure what an exchange, a join, training and failures cost."
    bench = App(
        name=PROGRAM,
        help=help_text,
        help_format="plaintext",
        version_flags=[],
        config=check_typed,
    )

    @bench.command
    def vectors(*, parameters: str = "1M", codec: str = "int4", repeat: int = 9, json: FiguresFlag = None) -> int:
        """Measure the CPU time of each step of a cycle, with compiled loops and with NumPy alone.

        Parameters
        ----------
        parameters
            length of the vectors, like 1M
        codec
            int4, int8, bfloat16 or float32
        repeat
            measurements of each step
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
        """Measure a whole exchange between real processes over libp2p, in turn with hivemind and gloo.

        The exchange starts with pseudo-gradients in memory and ends when all peers have applied the outer step.
        Measured are time, CPU and memory of all processes, bytes on the wire, and whether all peers end with the same
        bytes.

        Parameters
        ----------
        peers
            2 to 16, each a process with a libp2p daemon
        parameters
            length of the vector, like 10M
        codec
            codec of p2p_diloco's contributions and entries: int4, int8, bfloat16, float32
        against
            hivemind (its averager, float32 and float16), gloo (torch.distributed, float32), both, or none
        repeat
            measured turns of each system
        spans
            pieces in which p2p_diloco exchanges the vector; by default as many as `plan` recommends
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
    def chaos(
        *,
        islands: int = 8,
        minutes: float = 30.0,
        quiet_minutes: float | None = None,
        every: str = "30s",
        seed: int = 1,
        faults: str = "all",
        bootstrap_dies: bool = False,
        round_seconds: float = 2.0,
        json: FiguresFlag = None,
    ) -> int:
        """Measure how much of a run's training is kept while its peers fail.

        Real processes train at a fixed number of tokens per second: first without faults, then with one fault every 30
        seconds. Compared are the tokens that the entries of the final history include.

        Parameters
        ----------
        islands
            2 to 16, each a process with a libp2p daemon, beside a bootstrap peer
        minutes
            measured time of the play with faults
        quiet_minutes
            measured time of the play without faults; by default the same
        every
            time between two faults, like 30s; a process that ended is started again 5 s later
        seed
            seed of the faults
        faults
            all, or some of kill, daemon, leave, bootstrap, stop, cut, cut-in, cut-out, router, clock, disk
        bootstrap_dies
            kill the bootstrap peer when the measured time begins, and leave it dead
        round_seconds
            length of a round; a cycle has two
        """
        from benchmarks.commands.chaos import ChaosOptions, bench_chaos

        options = ChaosOptions(
            islands=islands,
            minutes=minutes,
            quiet_minutes=quiet_minutes,
            every=every,
            seed=seed,
            faults=faults,
            bootstrap_dies=bootstrap_dies,
            round_seconds=round_seconds,
            json=json,
        )
        return bench_chaos(options)

    @bench.command
    def memory(*, peers: int = 4, parameters: str = "10M,50M,125M", json: FiguresFlag = None) -> int:
        """Measure how much memory a peer needs beyond training itself.

        Real peers train and exchange. For comparison, a separate process trains the same model without a swarm. A line
        fitted through the sizes gives the bytes per parameter and the constant part.

        Parameters
        ----------
        peers
            2 to 16, each a process with a libp2p daemon
        parameters
            sizes of the models, measured one after the other, like 10M,50M
        """
        from benchmarks.commands.memory import MemoryOptions, bench_memory

        return bench_memory(MemoryOptions(peers=peers, parameters=parameters, json=json))

    @bench.command
    def state(
        *, megabytes: int = 800, donors: int = 3, killed: int = 1, repeat: int = 3, json: FiguresFlag = None
    ) -> int:
        """Measure how fast a newcomer fetches the whole state over libp2p while some donors are killed.

        The transfer ends when all spans are in place and their hashes agree with two donors. Measured are time, CPU and
        memory of all processes, the lag of the donors' event loops, and whether all peers hold the same bytes.

        Parameters
        ----------
        megabytes
            size of the state (anchor and momentum) in millions of bytes
        donors
            1 to 16, each a process with a libp2p daemon
        killed
            donors to kill when half of the bytes have arrived
        repeat
            transfers, each with new processes
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
        """Measure how much speed training keeps while islands exchange, compared with systems that wait.

        Real processes train a model of 10M parameters on real text. Inner steps per second with the exchange are
        divided by those without it, in the same processes just before and after. A cycle lasts four times as long as
        its transmission alone, so that a long cycle cannot hide the exchange.

        Parameters
        ----------
        islands
            2 to 16, each a process of one thread with a libp2p daemon
        uplink
            upload rate of each island: 5mbit, 20mbit, 100mbit, unlimited; separate several with commas
        against
            own-loop (steps as Swarm.step makes them), blocking (waits for each exchange), torchft (its DiLoCo over
            gloo), or none; separate several with commas
        codec
            codec of contributions and entries: int4, int8, bfloat16, float32
        fragments
            parts of the model, exchanged in turn; more parts mean shorter rounds, and a step must fit into a round
        spans
            pieces of each part; by default as many as `plan` recommends
        cycle_seconds
            length of a cycle; 0: four times its transmission
        repeat
            windows with the exchange, for each system and uplink
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
    def failures(
        *,
        islands: str = "1,2,4,8,16",
        repeat: int = 8,
        cycle_seconds: float = 24.0,
        pause_seconds: float = 18.0,
        every_seconds: float = 26.28,
        sustained_cycles: int = 24,
        json: FiguresFlag = None,
    ) -> int:
        """Simulate what the failure of an island costs a swarm. `goodput` computes with the result.

        The shipped peers run on virtual time. An island is killed at a random moment and starts again after a pause.
        Counted are the training that no entry names, spans and rounds without an entry, and the rounds until an entry
        includes the island again. Then failures keep coming at random.

        Parameters
        ----------
        islands
            sizes of the swarms, from 1 to 256, separated by commas; a bootstrap peer is beside them
        repeat
            single failures in each swarm
        cycle_seconds
            length of a cycle of four rounds
        pause_seconds
            time from a failure until the island starts again
        every_seconds
            mean time between two failures in the swarm while they keep coming; 26.28 s for 1.2 million chips that fail
            once a year
        sustained_cycles
            cycles measured while failures keep coming
        """
        from benchmarks.commands.failures import FailuresOptions, bench_failures

        options = FailuresOptions(
            islands=islands,
            repeat=repeat,
            cycle_seconds=cycle_seconds,
            pause_seconds=pause_seconds,
            every_seconds=every_seconds,
            sustained_cycles=sustained_cycles,
            json=json,
        )
        return bench_failures(options)

    @bench.command
    def goodput(*, costs: str | None = None, json: FiguresFlag = None) -> int:
        """Compute the share of chip-seconds that counts when one of millions of chips fails every few seconds.

        A model with three constants is fitted to five published points of data-parallel and DiLoCo with a central
        syncer, and predicts the other four. With the cost of a failure that `failures` measured, it gives the curve of
        this protocol for 1 to 1,024 islands. Nothing is measured here.

        Parameters
        ----------
        costs
            figures of `failures`; by default those kept in docs/performance
        """
        from benchmarks.commands.goodput import GoodputOptions, bench_goodput

        return bench_goodput(GoodputOptions(costs=costs, json=json))

    @bench.command
    def install_torchft() -> int:
        """Install torchft for `training` into a separate environment in this user's cache."""
        from benchmarks.commands.training import bench_install_torchft

        return bench_install_torchft()

    return bench
