"""Every document of figures says how they come about again, and where they were taken."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.command import make_app
from benchmarks.commands.document import bench_document, command_words
from benchmarks.options import AveragingOptions, MemoryOptions, StateOptions, TrainingOptions, VectorsOptions

AVERAGING = AveragingOptions(
    peers=4, parameters="10M", codec="int4", against="hivemind,gloo", spans=32, repeat=5, json="/home/me/figures.json"
)
TRAINING = TrainingOptions(
    islands=4, uplink="20mbit,unlimited", against="blocking", codec="int4", fragments=1, spans=32,
    cycle_seconds=0.0, repeat=2, json=None,
)  # fmt: skip


def test_the_command_is_told_with_its_defaults_and_without_paths() -> None:
    assert command_words("averaging", AVERAGING) == (
        "averaging --peers 4 --parameters 10M --codec int4 --against hivemind,gloo --spans 32 --repeat 5"
    )


def test_figures_keep_their_names_beside_command_and_machine() -> None:
    document = bench_document("averaging", AVERAGING, {"peers": 4, "systems": {}}, {"cores": 2})
    assert list(document) == ["command", "peers", "systems", "machine"]
    assert document["machine"] == {"cores": 2}


def test_the_words_of_every_bench_are_words_of_its_command_line() -> None:
    app = make_app()
    benches = {
        "vectors": VectorsOptions(codec="int4", parameters="1M", repeat=9, json="-"),
        "averaging": AVERAGING,
        "memory": MemoryOptions(peers=2, parameters="10M,40M", json="-"),
        "state": StateOptions(megabytes=800, donors=3, killed=1, repeat=3, json="-"),
        "training": TRAINING,
    }
    for name, options in benches.items():
        _, bound, *_ = app.parse_args(command_words(name, options).split(), print_error=False, exit_on_error=False)
        assert bound.kwargs["options"] == replace(options, json=None)
