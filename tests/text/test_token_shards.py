"""Texts of token shards: what is read is what the index says, and a peer needs few shards at a time."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from p2p_diloco.app.text.data import BatchStream, held_out_windows
from p2p_diloco.app.text.token_shards import (
    INDEX_FILE,
    SHARDS_OF_A_BLOCK,
    Shard,
    ShardIndex,
    Source,
    TokenText,
    decode_index,
    is_shard_folder,
)
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.storage.run_folder import TOKENIZER_FILE

RUN, PEER = Digest(bytes(32)), PeerId(bytes(32))
VOCABULARY = 70_000


def write_shard(folder: Path, name: str, tokens: np.ndarray) -> Shard:
    raw = tokens.astype("<u4").tobytes()
    (folder / name).write_bytes(raw)
    return Shard(name=name, tokens=len(tokens), sha256=sha256(raw).hex())


def write_text(folder: Path, *, shards: int = 40, weights: tuple[float, ...] = (1.0,)) -> ShardIndex:
    """Write shards of 100 tokens, each of one value: the number of its source and of the shard in it."""
    folder.mkdir(exist_ok=True)
    (folder / TOKENIZER_FILE).write_bytes(b"{}")
    index = ShardIndex(
        vocabulary=VOCABULARY,
        tokenizer=sha256(b"{}").hex(),
        end_token=None,
        bytes_per_token=3.5,
        sources=tuple(
            Source(
                name=f"books {source}",
                weight=weight,
                shards=tuple(
                    write_shard(folder, f"s{source}-{number:05}.bin", np.full(100, 1000 * source + number))
                    for number in range(shards)
                ),
            )
            for source, weight in enumerate(weights)
        ),
        held_out=(write_shard(folder, "held-out-00000.bin", np.arange(100)),),
    )
    (folder / INDEX_FILE).write_bytes(index.encode())
    return index


def stream_of(text: TokenText, *, batch: int = 1, position: int = 0, peer: PeerId = PEER) -> BatchStream:
    return BatchStream(text, RUN, peer, batch=batch, context=9, position=position)


def test_an_index_survives_encoding(tmp_path: Path) -> None:
    index = write_text(tmp_path, weights=(0.25, 3.0))
    assert decode_index(index.encode(), "it") == index
    assert is_shard_folder(tmp_path)
    assert TokenText(tmp_path).fingerprint == index.digest


def test_windows_come_from_a_few_shards_at_a_time_and_from_all_in_the_end(tmp_path: Path) -> None:
    write_text(tmp_path)
    text = TokenText(tmp_path)
    block = text.windows_of_block(10)
    assert block == SHARDS_OF_A_BLOCK * 100 // 10
    stream = stream_of(text)
    seen = [int(stream.next_batch()[0, 0]) for _ in range(40 * block)]
    assert all(len(set(seen[start : start + block])) <= SHARDS_OF_A_BLOCK for start in range(0, len(seen), block))
    assert set(seen) == set(range(40))


def test_a_stream_continues_where_it_stopped_and_differs_between_peers(tmp_path: Path) -> None:
    write_text(tmp_path)
    whole = [stream_of(TokenText(tmp_path), batch=200).next_batch()[:, 0].tolist()][0]
    later = stream_of(TokenText(tmp_path), batch=50, position=150).next_batch()[:, 0].tolist()
    assert later == whole[150:]
    other = stream_of(TokenText(tmp_path), batch=200, peer=PeerId(b"o" * 32)).next_batch()[:, 0].tolist()
    assert other != whole


def test_sources_are_mixed_by_weight_and_not_by_size(tmp_path: Path) -> None:
    write_text(tmp_path, shards=10, weights=(3.0, 1.0))
    stream = stream_of(TokenText(tmp_path), batch=20_000)
    share = float((stream.next_batch()[:, 0] < 1000).float().mean())
    assert 0.70 < share < 0.80


def test_held_out_windows_come_from_the_held_out_shards(tmp_path: Path) -> None:
    write_text(tmp_path)
    windows = held_out_windows(TokenText(tmp_path), context=9, num_windows=3)
    assert windows.tolist() == [list(range(start, start + 10)) for start in (0, 30, 60)]


def test_a_flipped_byte_is_noticed_before_its_shard_is_used(tmp_path: Path) -> None:
    write_text(tmp_path)
    path = tmp_path / "s0-00003.bin"
    raw = bytearray(path.read_bytes())
    raw[17] ^= 1
    path.write_bytes(raw)
    text = TokenText(tmp_path)
    text.read(0, 10)
    with pytest.raises(ConfigError, match=r"s0-00003.bin differs from the index, which expects SHA-256 [0-9a-f]{16}…"):
        text.read(300, 310)


def test_a_shard_that_is_cut_or_overwritten_during_training_is_noticed(tmp_path: Path) -> None:
    write_text(tmp_path)
    text, path = TokenText(tmp_path), tmp_path / "s0-00000.bin"
    content = path.read_bytes()
    text.read(0, 2)
    os.utime(path, ns=(1, 1))
    assert text.read(0, 2).tobytes() == content[:8], "a copy of the same bytes is as good"
    for other in (content[:-2], b"\1" + content[1:], b""):
        path.write_bytes(other)
        with pytest.raises(ConfigError, match=r"differs from the index, .*; copy it again from the organiser"):
            text.read(0, 2)


def test_a_missing_shard_and_a_token_out_of_range_are_named(tmp_path: Path) -> None:
    index = write_text(tmp_path, shards=1)
    (tmp_path / "held-out-00000.bin").unlink()
    with pytest.raises(ConfigError, match=r"held-out-00000.bin cannot be read .*; copy it again"):
        TokenText(tmp_path).read(100, 110)
    shard = write_shard(tmp_path, "s0-00000.bin", np.full(100, VOCABULARY))
    changed = dataclasses.replace(index, sources=(Source(name="x", weight=1.0, shards=(shard,)),))
    (tmp_path / INDEX_FILE).write_bytes(changed.encode())
    with pytest.raises(ConfigError, match=r"s0-00000.bin has token 70000; expected less than 70000"):
        TokenText(tmp_path).read(0, 10)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert TokenText(tmp_path).tokenizer() == b"{}"
    (tmp_path / TOKENIZER_FILE).write_bytes(b"{ }")
    with pytest.raises(ConfigError, match=r"tokenizer-files.json has SHA-256 .*, the text was made with"):
        TokenText(tmp_path).tokenizer()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 1}, "it has format 1; this version reads format 2"),
        ({"sources": []}, "lists no shards, or one twice"),
        ({"sources": [{"name": "x", "weight": 1.0, "shards": []}]}, "lists no shards, or one twice"),
        ({"vocabulary": True}, "True is not a whole number"),
        ({"vocabulary": 0}, "0 is not a whole number"),
        ({"tokenizer": "AB"}, "'AB' is not a SHA-256"),
        ({"bytes_per_token": float("inf")}, "inf is not a positive number"),
        ({"held_out": [["../secret", 5, "a" * 64]]}, "'../secret' is not a name of a shard"),
        ({"held_out": [["index.json", 5, "a" * 64]]}, "'index.json' is not a name of a shard"),
        ({"held_out": [["s0-00000.bin", 100, "a" * 64]]}, "lists no shards, or one twice"),
        ({"held_out": 7}, "is not a valid index of shards"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    document = json.loads(write_text(tmp_path, shards=1).encode()) | change
    encoded = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(ConfigError) as caught:
        decode_index(encoded, "index.json")
    assert reason in str(caught.value)
    assert "make it again with p2p-diloco tokenize" in str(caught.value)


def test_an_index_in_another_form_is_refused(tmp_path: Path) -> None:
    encoded = write_text(tmp_path).encode()
    with pytest.raises(ConfigError, match="it is not in canonical form"):
        decode_index(encoded + b"\n", "it")
    with pytest.raises(ConfigError, match="is not a valid index of shards"):
        decode_index(b"[" * 100_000, "it")
