"""`p2p-diloco simulate scale` and `split`: what a round costs as a swarm grows, what becomes of one cut in two."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from p2p_diloco.cli.figures_file import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.errors import ConfigError
from p2p_diloco.lab.scale import ScaleRow, measure
from p2p_diloco.lab.split import SplitRow, play_splits
from p2p_diloco.lab.stage import Violated
from p2p_diloco.watch.table import LOG_WIDTH

FEWEST_PEERS, MOST_PEERS = 2, 2048
BROKEN = 1
_UNITS = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """As typed.

    Attributes:
        peers: numbers with commas between them.
        parameters: of the model whose bytes are counted, like `100M`.
        dial_out_only: share of peers that accept no connection.
        seed: everything that is drawn follows from it.
        json: file for the figures, `-` for standard output.
    """

    peers: str
    parameters: str
    dial_out_only: float
    seed: int
    json: str | None


def run_scale(options: ScaleOptions) -> int:
    """Play every size, print a table; return 1 when replicas differed or a promise was broken.

    Raises:
        ConfigError: an option that means nothing.
        StateError: the figures cannot be written.
    """
    sizes = sizes_named(options.peers)
    parameters = count_named(options.parameters)
    if not 0.0 <= options.dial_out_only <= 1.0:
        raise ConfigError(f"--dial-out-only is {options.dial_out_only}; expected a share from 0 to 1")

    def play(size: int) -> ScaleRow:
        return measure(size, dial_out_only=options.dial_out_only, seed=options.seed, parameters=parameters)

    rows = _play_all(sizes, play, options.json)
    if rows is None:
        return BROKEN
    return 0 if all(row.replicas_equal for row in rows) else BROKEN


def run_split(num_peers: int, seed: int, to: str | None) -> int:
    """Cut a swarm in two, three ways; return 1 when it did not heal as promised.

    Raises:
        ConfigError: too few or too many peers.
        StateError: the figures cannot be written.
    """
    if not 4 <= num_peers <= MOST_PEERS:
        raise ConfigError(f"--peers is {num_peers}; expected 4 to {MOST_PEERS}")
    rows = _play_all(play_splits(num_peers, seed), lambda split: split(), to)
    if rows is None:
        return BROKEN
    return 0 if all(row.kept_its_promise for row in rows) else BROKEN


def _play_all(plans: Sequence[Any], play: Callable[[Any], Any], to: str | None) -> list[Any] | None:
    """Play, tell each row as it comes, and write the figures; None when a promise was broken."""
    check_target(to)
    console = Console(stderr=to == STANDARD_OUTPUT, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    rows: list[ScaleRow] | list[SplitRow] = []
    for plan in plans:
        began = time.monotonic()
        try:
            rows.append(play(plan))
        except Violated as broken:
            console.print(f"a promise was broken: {broken}", soft_wrap=True)
            return None
        console.print(_line(rows[-1], time.monotonic() - began), soft_wrap=True)
    console.print(_table(rows))
    write_figures(to, {"rows": [dataclasses.asdict(row) for row in rows]})
    return list(rows)


def sizes_named(text: str) -> list[int]:
    """Read `8,64,256`.

    Raises:
        ConfigError: it is something else, or out of bounds.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and FEWEST_PEERS <= int(word) <= MOST_PEERS for word in words):
        raise ConfigError(
            f"--peers is {text!r}; expected numbers from {FEWEST_PEERS} to {MOST_PEERS} with commas between them"
        )
    return [int(word) for word in words]


def count_named(text: str) -> int:
    """Read `100M` or `100000000`.

    Raises:
        ConfigError: it is neither.
    """
    word = text.strip().lower()
    unit = _UNITS.get(word[-1:], 1)
    number = word[:-1] if unit > 1 else word
    try:
        count = int(float(number) * unit)
    except (ValueError, OverflowError):
        count = 0
    if count < 1_000_000:
        raise ConfigError(f"--parameters is {text!r}; expected at least 1M, like 100M or 12B")
    return count


def _line(row: Any, seconds: float) -> str:
    told = ", ".join(f"{name} {_figure(value)}" for name, value in dataclasses.asdict(row).items())
    return f"{told} ({seconds:.0f} s)"


def _table(rows: Sequence[Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = [slot.name for slot in dataclasses.fields(rows[0])]
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_figure(getattr(row, name)) for name in names))
    return table


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
