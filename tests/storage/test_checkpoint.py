"""A checkpoint is restored bit for bit, or not at all."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from small_run import small_plan, start_states

from p2p_diloco.errors import StateError
from p2p_diloco.ids import SpanId, sha256
from p2p_diloco.outer.state import SpanState, state_digest
from p2p_diloco.span_log import SpanHead
from p2p_diloco.storage import checkpoint
from p2p_diloco.storage.checkpoint import CheckpointFolder, UnreadableCheckpoint, load_checkpoint, save_checkpoint

Patch = pytest.MonkeyPatch

PLAN = small_plan()
RUN = PLAN.rules.run
ELEMENTS = PLAN.rules.span_elements
SPAN = SpanId(0, 0)


def trained_states() -> dict[SpanId, SpanState]:
    """Return states from the middle of a run, with numbers that are hard for JSON and float32."""
    states = {}
    for place, (span, state) in enumerate(start_states(PLAN).items()):
        generator = np.random.Generator(np.random.Philox(key=place))
        momentum_N = generator.standard_normal(state.elements, dtype=np.float32)
        momentum_N[0] = np.float32(1e-42)
        head = replace(state.head, height=place, round=2 * place, radius=0.1 + place / 3, median_weight=1 / 7)
        states[span] = SpanState(head=head, anchor_N=state.anchor_N + momentum_N, momentum_N=momentum_N)
    return states


def saved(path: Path) -> Path:
    save_checkpoint(path, RUN, trained_states())
    return path


def rewrite(path: Path, *, heads: Any = None, run: str | None = RUN.hex(), **tensors: Any) -> None:
    """Rewrite a checkpoint with other heads, another run or other tensors, but keep its content digests."""
    names = [f"{span.fragment}.{span.index}" for span in sorted(ELEMENTS)]
    states = trained_states()
    heads_kept = [checkpoint.head_to_json(state.head) for _, state in sorted(states.items())]
    kept = dict(zip(names, heads_kept, strict=True))
    with safe_open(path, framework="numpy") as file:
        contents = file.metadata()["contents"]
    metadata = {"heads": json.dumps(kept if heads is None else heads(kept)), "contents": contents}
    if run is not None:
        metadata["run"] = run
    save_file(load_file(path) | tensors, path, metadata=metadata)


def test_states_are_restored_bit_for_bit(tmp_path: Path) -> None:
    states = trained_states()
    loaded = load_checkpoint(saved(tmp_path / "c"), RUN, ELEMENTS)
    assert loaded is not None
    assert {span: state.head for span, state in loaded.items()} == {span: s.head for span, s in states.items()}
    assert state_digest([loaded[span] for span in sorted(loaded)]) == state_digest([states[s] for s in sorted(states)])


class Moving(dict[SpanId, SpanState]):
    """States that move on as soon as one of them is read for the file."""

    def __init__(self, states: dict[SpanId, SpanState], later: dict[SpanId, SpanState]) -> None:
        super().__init__(states)
        self.later, self.reads = later, dict.fromkeys(states, 0)

    def __getitem__(self, span: SpanId) -> SpanState:
        self.reads[span] += 1
        state = super().__getitem__(span)
        for other in self.later:
            self[other] = self.later[other]
        return state


def test_spans_that_move_on_during_the_write_are_written_whole(tmp_path: Path) -> None:
    later = trained_states()
    long = 1.2345678901234567e-300
    for span, state in later.items():
        later[span] = replace(state, head=replace(state.head, height=10**9, round=10**12, radius=long))
    save_checkpoint(tmp_path / "c", RUN, Moving(start_states(PLAN), later))
    loaded = load_checkpoint(tmp_path / "c", RUN, ELEMENTS)
    assert loaded is not None
    assert {span: state.head for span, state in loaded.items()} == {span: state.head for span, state in later.items()}


@pytest.mark.parametrize("number", [5e-324, -sys.float_info.max, -1.2345678901234567e-300, 0.1 + 0.2, -0.0])
def test_every_head_fits_in_the_room_reserved_for_it(number: float) -> None:
    head = SpanHead(
        digest=sha256(b"x"), height=2**62, round=-(2**50), roster=sha256(b"y"), radius=number, median_weight=number
    )
    assert len(json.dumps(checkpoint.head_to_json(head))) <= len(json.dumps(checkpoint.LONGEST_HEAD))


def test_a_missing_checkpoint_loads_as_none(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "missing", RUN, ELEMENTS) is None


def test_a_later_checkpoint_replaces_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, RUN, start_states(PLAN))
    saved(path)
    loaded = load_checkpoint(path, RUN, ELEMENTS)
    assert loaded is not None
    assert loaded[SPAN].momentum_N.any()
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_of_another_run_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    before = path.read_bytes()
    with pytest.raises(StateError, match="belongs to another run and is not used"):
        load_checkpoint(path, sha256(b"another"), ELEMENTS)
    assert path.read_bytes() == before


@pytest.mark.parametrize("keep", [0, 7, 100, -1, -4096])
def test_a_torn_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = saved(tmp_path / "c")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StateError, match=r"is broken .* and is not used"):
        load_checkpoint(path, RUN, ELEMENTS)


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 64, b"\x80\x04pickle", b"{}" * 100])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(StateError, match="is broken"):
        load_checkpoint(tmp_path / "c", RUN, ELEMENTS)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    with pytest.raises(StateError, match="is broken"):
        load_checkpoint(tmp_path / "c", RUN, ELEMENTS)


def changed(**values: Any) -> Any:
    return lambda heads: heads | {"0.0": heads["0.0"] | values}


@pytest.mark.parametrize(
    "heads",
    [
        lambda heads: {},
        lambda heads: [],
        lambda heads: 3,
        lambda heads: heads | {"0.0": None},
        lambda heads: heads | {"0.0": {}},
        changed(digest="abc"),
        changed(digest="00"),
        changed(digest=7),
        changed(roster=""),
        changed(height=-1),
        changed(height="many"),
        changed(round=None),
        changed(radius=float("nan")),
        changed(radius=0.0),
        changed(median_weight=0.0),
        changed(median_weight=float("inf")),
    ],
)
def test_invalid_heads_are_refused(tmp_path: Path, heads: Any) -> None:
    path = saved(tmp_path / "c")
    rewrite(path, heads=heads)
    with pytest.raises(StateError, match="is broken"):
        load_checkpoint(path, RUN, ELEMENTS)


N = ELEMENTS[SPAN]


@pytest.mark.parametrize(
    "anchor_N",
    [
        np.zeros(N + 64, np.float32),
        np.zeros((N, 1), np.float32),
        np.zeros(N, np.float64),
        np.zeros(N, np.int32),
        np.full(N, np.nan, np.float32),
        np.full(N, np.inf, np.float32),
    ],
    ids=["longer", "matrix", "float64", "int32", "nan", "infinity"],
)
@pytest.mark.parametrize("kind", ["anchor", "momentum"])
def test_vectors_that_do_not_fit_are_refused(tmp_path: Path, kind: str, anchor_N: Any) -> None:
    path = saved(tmp_path / "c")
    rewrite(path, **{f"{kind}.0.0": anchor_N})
    with pytest.raises(StateError, match="is broken"):
        load_checkpoint(path, RUN, ELEMENTS)


def test_a_checkpoint_of_another_grid_of_spans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is broken"):
        load_checkpoint(saved(tmp_path / "c"), RUN, ELEMENTS | {SpanId(9, 9): 64})


def test_a_safetensors_file_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    save_file({"weight": np.zeros(4, np.float32)}, tmp_path / "c")
    with pytest.raises(StateError, match="is broken"):
        load_checkpoint(tmp_path / "c", RUN, ELEMENTS)


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path, monkeypatch: Patch) -> None:
    path = saved(tmp_path / "c")
    before = path.read_bytes()

    def fill_the_disk(draft: Path, *_: Any, **__: Any) -> None:
        draft.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", fill_the_disk)
    with pytest.raises(StateError, match="No space left on device; the previous one is kept; free some space"):
        saved(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_real_write_error_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(StateError, match="cannot write the checkpoint"):
            saved(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot write the checkpoint"):
        saved(tmp_path / "gone" / "c")


def test_a_flipped_bit_anywhere_in_the_vectors_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    raw = path.read_bytes()
    header_bytes = 8 + int.from_bytes(raw[:8], "little")
    for place in range(header_bytes, len(raw), (len(raw) - header_bytes) // 50):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(StateError, match="is broken"):
            load_checkpoint(path, RUN, ELEMENTS)
    path.write_bytes(raw)
    assert load_checkpoint(path, RUN, ELEMENTS) is not None


def folder_in(path: Path, keep: int = 3) -> CheckpointFolder:
    return CheckpointFolder(path, run=RUN, elements=ELEMENTS, keep=keep)


def at_height(height: int) -> dict[SpanId, SpanState]:
    states = trained_states()
    return {span: replace(state, head=replace(state.head, height=height)) for span, state in states.items()}


def refuse_to_open(monkeypatch: Patch, refused: Path, number: int) -> None:
    """Have the system open any file but `refused`; permissions would not do, because tests may run as root."""
    really_open = Path.open

    def open_unless_refused(path: Path, *choices: Any, **named: Any) -> Any:
        if path == refused:
            raise OSError(number, os.strerror(number), str(path))
        return really_open(path, *choices, **named)

    monkeypatch.setattr(Path, "open", open_unless_refused)


def newest_height(folder: CheckpointFolder) -> int:
    states, _ = folder.load_newest()
    assert states is not None
    return states[SPAN].head.height


def test_the_latest_few_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    assert folder_in(tmp_path / "missing").load_newest() == (None, ())
    for height in range(5):
        folder.save(at_height(height))
        assert newest_height(folder_in(tmp_path)) == height
    assert len(folder.paths()) == 3
    assert [state.head.height for state in folder.load_span(SPAN)] == [2, 3, 4]
    folder_in(tmp_path, keep=1).save(at_height(9))
    assert len(folder.paths()) == 1


def test_broken_checkpoints_are_set_aside_and_the_next_older_one_is_loaded(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    for height in range(3):
        folder.save(at_height(height))
    torn, flipped = folder.paths()[2], folder.paths()[1]
    torn.write_bytes(torn.read_bytes()[:-1])
    raw = bytearray(flipped.read_bytes())
    raw[-1] ^= 1
    flipped.write_bytes(raw)
    states, refused = folder.load_newest()
    assert states is not None
    assert states[SPAN].head.height == 0
    assert [text.split(" is ")[0] for text in refused] == [f"the checkpoint {torn}", f"the checkpoint {flipped}"]
    assert folder.paths() == (tmp_path / "checkpoint-000000000.safetensors",)
    assert [path.name for path in tmp_path.glob("refused-*")] == [f"refused-{torn.name}"], "only the newest one"


def test_if_all_are_broken_the_newest_is_kept_for_inspection(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    for _ in range(2):
        for height in range(3):
            folder.save(at_height(height))
            folder.paths()[-1].write_bytes(b"torn %d" % height)
        states, refused = folder.load_newest()
        assert (states, len(refused)) == (None, 3)
        (kept,) = tmp_path.iterdir()
        assert (kept.name, kept.read_bytes()) == ("refused-checkpoint-000000002.safetensors", b"torn 2")


def test_an_unreadable_file_costs_no_file_and_the_error_explains_what_to_do(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = folder_in(tmp_path)
    for height in range(3):
        folder.save(at_height(height))
    oldest, locked, torn = folder.paths()
    torn.write_bytes(b"torn")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        refuse_to_open(patch, locked, errno.EACCES)
        with pytest.raises(UnreadableCheckpoint, match="Permission denied; it was not changed; give this user") as told:
            folder.load_newest()
        assert str(locked) in str(told.value)
        assert [state.head.height for state in folder.load_span(SPAN)] == [0], "load_span skips it"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert newest_height(folder) == 1
    assert folder.paths() == (oldest, locked)


def test_a_read_error_does_not_count_as_a_broken_checkpoint(tmp_path: Path, monkeypatch: Patch) -> None:
    path = saved(tmp_path / "c")

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint, "safe_open", fail)
    with pytest.raises(UnreadableCheckpoint, match=r"cannot read the checkpoint .*: Input/output error; "):
        load_checkpoint(path, RUN, ELEMENTS)


def test_an_unreadable_folder_does_not_count_as_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UnreadableCheckpoint, match=r"cannot read the folder of checkpoints .*; give this user read access"
    ):
        folder_in(tmp_path / "file").load_newest()


def test_a_broken_checkpoint_that_cannot_be_set_aside_is_reported(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = folder_in(tmp_path)
    folder.save(at_height(1))
    folder.paths()[0].write_bytes(b"torn")

    def fail(*_: Any) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(StateError, match=r"cannot rename the broken checkpoint .*: Permission denied; give"):
        folder.load_newest()


def test_checkpoints_of_another_run_are_refused_with_a_sentence(tmp_path: Path) -> None:
    folder_in(tmp_path).save(at_height(1))
    other = CheckpointFolder(tmp_path, run=sha256(b"another"), elements=ELEMENTS, keep=3)
    assert list(other.load_span(SPAN)) == []
    states, (sentence,) = other.load_newest()
    assert states is None
    assert "belongs to another run and is not used" in sentence


def test_a_failed_write_keeps_the_older_checkpoint(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = folder_in(tmp_path, keep=1)
    folder.save(at_height(1))

    def fill_the_disk(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", fill_the_disk)
    with pytest.raises(StateError, match="No space left on device"):
        folder.save(at_height(2))
    assert newest_height(folder) == 1
