from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.app.text import mapped_files
from p2p_diloco.app.text.data import (
    MIN_CORPUS_BYTES,
    BatchStream,
    Corpus,
    WindowIndex,
    held_out_windows,
    open_corpus,
)
from p2p_diloco.app.text.mapped_files import MappedFiles
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, PeerId

RUN = Digest(b"r" * 32)
ALICE, BOB = PeerId(b"a" * 32), PeerId(b"b" * 32)


def corpus_of(folder: Path, text: bytes, **options: float) -> Corpus:
    path = folder / "text.bin"
    path.write_bytes(text)
    return open_corpus(path, **options)


def stream_of(corpus: Corpus, peer: PeerId = ALICE, run: Digest = RUN, **changes: int) -> BatchStream:
    return BatchStream(corpus, run, peer, **{"batch": 3, "context": 12} | changes)


def noise(length: int, symbols: int = 256) -> bytes:
    return np.random.default_rng(0).integers(0, symbols, length, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("length", [MIN_CORPUS_BYTES, 100_003, 655_359, 1_000_001])
@pytest.mark.parametrize("share", [0.001, 0.05, 0.5])
def test_parts_cover_the_text_once_and_hold_out_their_share(tmp_path: Path, length: int, share: float) -> None:
    corpus = corpus_of(tmp_path, bytes(length), held_out_share=share)
    stretches = np.stack((corpus.train_parts, corpus.held_out_parts), axis=1).reshape(-1, 2)
    assert stretches[0, 0] == 0
    assert stretches[-1, 1] == length
    assert np.array_equal(stretches[1:, 0], stretches[:-1, 1])
    assert (stretches[:, 0] < stretches[:, 1]).all()
    assert np.diff(corpus.held_out_parts).sum() == pytest.approx(share * length, abs=len(stretches))


@pytest.mark.parametrize("share", [0.0, -0.1, 0.6])
def test_a_held_out_share_out_of_range_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(ConfigError, match=r"held-out share is .*; expected at least 0\.001 and at most 0\.5"):
        corpus_of(tmp_path, bytes(MIN_CORPUS_BYTES), held_out_share=share)


def test_a_text_that_is_too_short_is_refused_with_its_length(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text is 900 bytes long; expected at least 16384; name a longer file"):
        corpus_of(tmp_path, bytes(900))


def test_the_same_files_have_the_same_fingerprint_anywhere(tmp_path: Path) -> None:
    text = noise(50_000)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    assert corpus_of(tmp_path / "one", text).fingerprint == corpus_of(tmp_path / "two", text).fingerprint


@pytest.mark.parametrize("position", [0, 16_383, 16_384, 49_999])
def test_one_changed_byte_changes_the_fingerprint(tmp_path: Path, position: int) -> None:
    text = bytearray(noise(50_000))
    before = corpus_of(tmp_path, bytes(text)).fingerprint
    text[position] ^= 1
    assert corpus_of(tmp_path, bytes(text)).fingerprint != before


def test_the_same_text_split_differently_has_another_fingerprint(tmp_path: Path) -> None:
    text = noise(50_000)
    for folder, cut in (("one", 20_000), ("two", 30_000)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a").write_bytes(text[:cut])
        (tmp_path / folder / "b").write_bytes(text[cut:])
    assert open_corpus(tmp_path / "one").fingerprint != open_corpus(tmp_path / "two").fingerprint


def test_a_fingerprint_reads_a_bounded_amount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_files, "_FINGERPRINT_PIECES", 4)
    monkeypatch.setattr(mapped_files, "_FINGERPRINT_PIECE_BYTES", 100)
    (tmp_path / "text").write_bytes(noise(50_000))
    files = MappedFiles((tmp_path / "text",))
    read: list[tuple[int, int]] = []
    plain = files.read
    monkeypatch.setattr(files, "read", lambda start, stop: (read.append((start, stop)), plain(start, stop))[1])
    assert len(files.fingerprint) == 32
    assert read == [(0, 100), (12_500, 12_600), (25_000, 25_100), (37_500, 37_600)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 6))
def test_windows_are_numbered_without_gaps_and_do_not_cross_parts(lengths: list[int], window_bytes: int) -> None:
    parts = []
    start = 0
    for length in lengths:
        parts.append((start, start + length))
        start += length + 3
    expected = [first for low, high in parts for first in range(low, high - window_bytes + 1)]
    if not expected:
        with pytest.raises(ConfigError, match=rf"no stretch of {window_bytes} tokens"):
            WindowIndex(np.array(parts), window_bytes, "training")
        return
    index = WindowIndex(np.array(parts), window_bytes, "training")
    assert [index.start_of(window) for window in range(index.num_windows)] == expected


def test_a_batch_is_windows_of_the_training_text_as_int64(corpus: Corpus) -> None:
    batch = stream_of(corpus).next_batch()
    assert batch.shape == (3, 13)
    assert batch.dtype == torch.int64
    text = corpus.read(0, corpus.num_bytes).tobytes()
    for row in batch:
        assert bytes(row.tolist()) in text


def test_training_never_reads_a_held_out_byte(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, bytes(700_000))
    is_held_out = np.zeros(corpus.num_bytes, dtype=bool)
    for start, stop in corpus.held_out_parts:
        is_held_out[start:stop] = True
    read: list[tuple[int, int]] = []
    stream = stream_of(corpus, batch=500)
    corpus.read = lambda start, stop: (read.append((start, stop)), np.zeros(13, np.uint8))[1]  # type: ignore[method-assign]
    stream.next_batch()
    assert len(read) == 500
    assert not any(is_held_out[start:stop].any() for start, stop in read)


def test_a_stream_depends_only_on_run_peer_and_position(corpus: Corpus) -> None:
    first = stream_of(corpus).next_batch()
    assert torch.equal(stream_of(corpus).next_batch(), first)
    assert not torch.equal(stream_of(corpus, peer=BOB).next_batch(), first)
    assert not torch.equal(stream_of(corpus, run=Digest(b"s" * 32)).next_batch(), first)
    assert not torch.equal(stream_of(corpus, position=3).next_batch(), first)


def test_a_stream_resumes_at_its_position_with_any_batch_size(corpus: Corpus) -> None:
    whole = stream_of(corpus, batch=10).next_batch()
    stream = stream_of(corpus, batch=4)
    parts = [stream.next_batch()]
    resumed = stream_of(corpus, batch=6, position=stream.position)
    parts.append(resumed.next_batch())
    assert torch.equal(torch.cat(parts), whole)
    assert resumed.position == 10


def test_windows_are_spread_evenly_over_the_text(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, noise(200_000))
    stream = stream_of(corpus)
    starts: list[int] = []
    corpus.read = lambda start, stop: (starts.append(start), np.zeros(13, np.uint8))[1]  # type: ignore[method-assign]
    for _ in range(1_000):
        stream.next_batch()
    counts, _ = np.histogram(starts, bins=10, range=(0, 190_000))
    assert counts.min() > 230
    assert counts.max() < 370


@pytest.mark.parametrize("changes", [{"batch": 0}, {"position": -1}])
def test_a_batch_or_position_out_of_range_is_refused(corpus: Corpus, changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"expected at least 1 and at least 0"):
        stream_of(corpus, **changes)


def test_a_context_longer_than_any_stretch_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"the training text has no stretch of 100001 tokens \(the longest has \d+\)"):
        stream_of(corpus, context=100_000)
    with pytest.raises(ConfigError, match=r"the held-out text has no stretch of 10001 tokens"):
        held_out_windows(corpus, context=10_000, num_windows=4)


def test_held_out_windows_are_fixed_spread_and_held_out(tmp_path: Path) -> None:
    text = bytearray(noise(700_000, symbols=255))
    plain = corpus_of(tmp_path, bytes(text))
    for start, stop in plain.held_out_parts:
        text[start:stop] = b"\xff" * (stop - start)
    windows = held_out_windows(corpus_of(tmp_path, bytes(text)), context=12, num_windows=50)
    assert windows.shape == (50, 13)
    assert (windows == 255).all()
    plain = corpus_of(tmp_path, bytes(text))
    assert torch.equal(held_out_windows(plain, context=12, num_windows=50)[0], windows_at(plain, 0))


def windows_at(corpus: Corpus, part: int) -> torch.Tensor:
    start = int(corpus.held_out_parts[part, 0])
    return torch.from_numpy(corpus.read(start, start + 13).astype(np.int64))


def test_held_out_windows_are_limited_by_the_held_out_text(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, noise(MIN_CORPUS_BYTES))
    assert len(held_out_windows(corpus, context=800, num_windows=10**6)) == np.diff(corpus.held_out_parts).sum() - 800


def test_the_default_text_is_python_source() -> None:
    corpus = open_corpus(None)
    start, stop = corpus.held_out_parts[0].tolist()
    assert b"def " in corpus.read(start, stop).tobytes()
    assert np.diff(corpus.held_out_parts).sum() > 200_000


@pytest.mark.parametrize("held", [[], [(0, 10)], [(0, 700_000)], [(300_000, 400_000), (500_000, 2_000_000)]])
def test_a_corpus_within_ranges_has_exactly_the_stretches_that_lie_inside(
    tmp_path: Path, held: list[tuple[int, int]]
) -> None:
    (tmp_path / "long.txt").write_bytes(bytes(2_000_000))
    whole = open_corpus(tmp_path / "long.txt")
    part = whole.within(held)
    for own, everything in ((part.train_parts, whole.train_parts), (part.held_out_parts, whole.held_out_parts)):
        inside = [row for row in everything.tolist() if any(a <= row[0] and row[1] <= b for a, b in held)]
        assert own.tolist() == inside
    assert part.num_bytes == whole.num_bytes, "positions stay those of the whole text"
