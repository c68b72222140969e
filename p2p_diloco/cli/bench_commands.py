"""The commands that measure. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

from cyclopts import App


def make_bench() -> App:
    """Return `bench`, a command with commands of its own."""
    bench = App(name="bench", help="Measure on this machine, side by side in one run.")

    @bench.command
    def vectors(*, parameters: str = "1M", codec: str = "int4", repeat: int = 9, json: str | None = None) -> int:
        """Measure what each step of a cycle costs a core, with compiled loops and with NumPy alone.

        Parameters
        ----------
        parameters
            length of the vectors, like 1M
        codec
            int4, int8, bfloat16 or float32
        repeat
            measurements of each
        json
            file for the figures, or - for standard output
        """
        from p2p_diloco.cli.bench import VectorsOptions, bench_vectors

        return bench_vectors(VectorsOptions(codec=codec, parameters=parameters, repeat=repeat, json=json))

    return bench
