"""Command line of the benchmarks. Heavy modules are imported only when a benchmark runs."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import App

from benchmarks.options import (
    AveragingOptions,
    ChaosOptions,
    FailuresOptions,
    GoodputOptions,
    MemoryOptions,
    StateOptions,
    TrainingOptions,
    VectorsOptions,
)
from p2p_diloco.app.cli.command_line import call_command, check_typed, exit_code_of

PROGRAM = "python -m benchmarks"
_VECTORS = VectorsOptions()
_AVERAGING = AveragingOptions()
_CHAOS = ChaosOptions()
_MEMORY = MemoryOptions()
_STATE = StateOptions()
_TRAINING = TrainingOptions()
_FAILURES = FailuresOptions()
_GOODPUT = GoodputOptions()


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
    def vectors(*, options: VectorsOptions = _VECTORS) -> int:
        """Measure the CPU time of each step of a cycle, with compiled loops and with NumPy alone."""
        from benchmarks.commands.vectors import bench_vectors

        return bench_vectors(options)

    @bench.command
    def averaging(*, options: AveragingOptions = _AVERAGING) -> int:
        """Measure a whole exchange between real processes over libp2p, in turn with hivemind and gloo.

        The exchange starts with pseudo-gradients in memory and ends when all peers have applied the outer step.
        Measured are time, CPU and memory of all processes, bytes on the wire, and whether all peers end with the same
        bytes.
        """
        from benchmarks.commands.averaging import bench_averaging

        return bench_averaging(options)

    @bench.command
    def chaos(*, options: ChaosOptions = _CHAOS) -> int:
        """Measure how much of a run's training is kept while its peers fail.

        Real processes train at a fixed number of tokens per second: first without faults, then with one fault every 30
        seconds. Compared are the tokens that the entries of the final history include.
        """
        from benchmarks.commands.chaos import bench_chaos

        return bench_chaos(options)

    @bench.command
    def memory(*, options: MemoryOptions = _MEMORY) -> int:
        """Measure how much memory a peer needs beyond training itself.

        Real peers train and exchange. For comparison, a separate process trains the same model without a swarm. A line
        fitted through the sizes gives the bytes per parameter and the constant part.
        """
        from benchmarks.commands.memory import bench_memory

        return bench_memory(options)

    @bench.command
    def state(*, options: StateOptions = _STATE) -> int:
        """Measure how fast a newcomer fetches the whole state over libp2p while some donors are killed.

        The transfer ends when all spans are in place and their hashes agree with two donors. Measured are time, CPU and
        memory of all processes, the lag of the donors' event loops, and whether all peers hold the same bytes.
        """
        from benchmarks.commands.state import bench_state

        return bench_state(options)

    @bench.command
    def training(*, options: TrainingOptions = _TRAINING) -> int:
        """Measure how much speed training keeps while islands exchange, compared with systems that wait.

        Real processes train a model of 10M parameters on real text. Inner steps per second with the exchange are
        divided by those without it, in the same processes just before and after. A cycle lasts four times as long as
        its transmission alone, so that a long cycle cannot hide the exchange.
        """
        from benchmarks.commands.training import bench_training

        return bench_training(options)

    @bench.command
    def failures(*, options: FailuresOptions = _FAILURES) -> int:
        """Simulate what the failure of an island costs a swarm. `goodput` computes with the result.

        The shipped peers run on virtual time. An island is killed at a random moment and starts again after a pause.
        Counted are the training that no entry names, spans and rounds without an entry, and the rounds until an entry
        includes the island again. Then failures keep coming at random.
        """
        from benchmarks.commands.failures import bench_failures

        return bench_failures(options)

    @bench.command
    def goodput(*, options: GoodputOptions = _GOODPUT) -> int:
        """Compute the share of chip-seconds that counts when one of millions of chips fails every few seconds.

        A model with three constants is fitted to five published points of data-parallel and DiLoCo with a central
        syncer, and predicts the other four. With the cost of a failure that `failures` measured, it gives the curve of
        this protocol for 1 to 1,024 islands. Nothing is measured here.
        """
        from benchmarks.commands.goodput import bench_goodput

        return bench_goodput(options)

    @bench.command
    def install_torchft() -> int:
        """Install torchft for `training` into a separate environment in this user's cache."""
        from benchmarks.commands.training import bench_install_torchft

        return bench_install_torchft()

    return bench
