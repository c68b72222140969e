"""A checkpoint comes back bit by bit, or not at all."""

from __future__ import annotations

import errno
import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_run import small_plan, start_states

from p2p_diloco.errors import StateError
from p2p_diloco.ids import SpanId, sha256
from p2p_diloco.outer.state import SpanState, state_digest
from p2p_diloco.trainer import checkpoint
from p2p_diloco.trainer.checkpoint import load_checkpoint, save_checkpoint

PLAN = small_plan()
RUN = PLAN.rules.run
ELEMENTS = PLAN.rules.span_elements
SPAN = SpanId(0, 0)


def trained_states() -> dict[SpanId, SpanState]:
    """Return states as they are somewhere in a run, with numbers that JSON and float32 treat badly."""
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
    """Write a checkpoint anew with other heads, another run or other tensors."""
    names = [f"{span.fragment}.{span.index}" for span in sorted(ELEMENTS)]
    states = trained_states()
    heads_kept = [checkpoint._head_to_json(state.head) for _, state in sorted(states.items())]
    kept = dict(zip(names, heads_kept, strict=True))
    metadata = {"heads": json.dumps(kept if heads is None else heads(kept))}
    if run is not None:
        metadata["run"] = run
    save_file(load_file(path) | tensors, path, metadata=metadata)


def test_states_come_back_bit_by_bit(tmp_path: Path) -> None:
    states = trained_states()
    loaded = load_checkpoint(saved(tmp_path / "c"), RUN, ELEMENTS)
    assert loaded is not None
    assert {span: state.head for span, state in loaded.items()} == {span: s.head for span, s in states.items()}
    assert state_digest([loaded[span] for span in sorted(loaded)]) == state_digest([states[s] for s in sorted(states)])


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "missing", RUN, ELEMENTS) is None


def test_a_later_checkpoint_replaces_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, RUN, start_states(PLAN))
    saved(path)
    loaded = load_checkpoint(path, RUN, ELEMENTS)
    assert loaded is not None
    assert loaded[SPAN].momentum_N.any()
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_another_run_s_checkpoint_is_refused_and_left(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    before = path.read_bytes()
    with pytest.raises(StateError, match="belongs to another run; choose another --state-directory"):
        load_checkpoint(path, sha256(b"another"), ELEMENTS)
    assert path.read_bytes() == before


@pytest.mark.parametrize("keep", [0, 7, 100, -1, -4096])
def test_a_torn_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = saved(tmp_path / "c")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StateError, match=r"is broken .*; move it away to fetch the state anew"):
        load_checkpoint(path, RUN, ELEMENTS)


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 64, b"\x80\x04pickle", b"{}" * 100])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(StateError, match="is broken"):
        load_checkpoint(tmp_path / "c", RUN, ELEMENTS)


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
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
        changed(median_weight=float("inf")),
    ],
)
def test_heads_that_make_no_sense_are_refused(tmp_path: Path, heads: Any) -> None:
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


def test_a_safetensors_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    save_file({"weight": np.zeros(4, np.float32)}, tmp_path / "c")
    with pytest.raises(StateError, match="is broken"):
        load_checkpoint(tmp_path / "c", RUN, ELEMENTS)


def test_a_full_disk_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "c")
    before = path.read_bytes()

    def fill_the_disk(tensors: Any, draft: Path, metadata: Any) -> None:
        draft.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fill_the_disk)
    with pytest.raises(StateError, match="No space left on device; the one before is kept; free some space"):
        saved(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_disk_that_really_refuses_keeps_the_one_before(tmp_path: Path) -> None:
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


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot write the checkpoint"):
        saved(tmp_path / "gone" / "c")
