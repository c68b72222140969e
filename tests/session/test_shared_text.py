"""A text that arrives while a peer trains: files on request, batches from what is here, at last the whole stream."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from p2p_diloco.app.text import run_text
from p2p_diloco.app.text.data import BatchStream, open_corpus
from p2p_diloco.app.text.data import Text as AnyText
from p2p_diloco.app.text.run_text import ArrivingText
from p2p_diloco.app.text.token_shards import INDEX_FILE, Shard, ShardIndex, Source, TokenText
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.wire.file_list import FILE_PIECE_BYTES, FileList
from p2p_diloco.session.shared_text import SharedText
from p2p_diloco.storage.run_folder import TOKENIZER_FILE
from p2p_diloco.storage.text_copy import OwnText, TextStore, list_own_text
from simulator.virtual_time import run_virtual

RUN, ME = sha256(b"run"), PeerId(bytes(32))
CONTEXT, BATCH = 32, 8
NUM_PIECES = 6


class Text:
    """A text of two files, and a store into which a test puts its pieces."""

    def __init__(self, folder: Path) -> None:
        root = folder / "own"
        root.mkdir()
        letters = np.random.default_rng(2).integers(97, 123, size=NUM_PIECES * FILE_PIECE_BYTES, dtype=np.uint8)
        (root / "a.txt").write_bytes(letters[: 2 * FILE_PIECE_BYTES].tobytes())
        (root / "b.txt").write_bytes(letters[2 * FILE_PIECE_BYTES :].tobytes())
        self.root = root
        self.own: OwnText = list_own_text(str(root))
        self.store = TextStore(folder / "store", self.own.digest)
        self.shared = SharedText(self.store)

    @property
    def listed(self) -> FileList:
        assert self.own.listed is not None
        return self.own.listed

    def list_arrives(self) -> None:
        assert self.store.adopt(self.listed.encode())

    def arrives(self, *pieces: int) -> None:
        for piece in pieces:
            _, content = self.own.read(self.listed.piece(piece).digest, 0, FILE_PIECE_BYTES)
            assert self.store.keep(piece, content)

    def stream(self, *, needs_all: bool = False, position: int = 0, peer: PeerId = ME) -> ArrivingText:
        return ArrivingText(
            self.shared,
            open_whole=lambda: open_corpus(self.shared.root, is_arriving=True),
            stream_of=stream_at,
            batch=BATCH,
            context=CONTEXT,
            position=position,
            is_tokens=False,
            needs_all=needs_all,
            peer=peer,
        )

    def whole_stream(self, position: int = 0) -> BatchStream:
        return stream_at(open_corpus(str(self.root)), position)

    def is_in(self, batch: torch.Tensor, *pieces: int) -> bool:
        """Return whether every window of a batch is text of these pieces."""
        text = b"\0".join(map(self.piece, pieces))
        return all(row.to(torch.uint8).numpy().tobytes() in text for row in batch)

    def piece(self, number: int) -> bytes:
        return self.own.read(self.listed.piece(number).digest, 0, FILE_PIECE_BYTES)[1]


def stream_at(corpus: AnyText, position: int) -> BatchStream:
    return BatchStream(corpus, RUN, ME, batch=BATCH, context=CONTEXT, position=position)


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return Text(tmp_path)


def test_files_are_named_once_the_list_is_here_and_held_once_all_their_bytes_are(text: Text) -> None:
    assert text.shared.names() == ()
    assert not text.shared.has([])
    text.list_arrives()
    assert text.shared.names() == ("a.txt", "b.txt")
    text.arrives(0)
    assert not text.shared.has(["a.txt"])
    text.arrives(1)
    assert text.shared.has(["a.txt"])
    assert not text.shared.has(["a.txt", "b.txt"])
    assert (text.shared.root / "a.txt").read_bytes() == (text.root / "a.txt").read_bytes()
    text.arrives(2, 3, 4, 5)
    assert text.shared.is_whole()


def test_files_that_training_wants_are_marked_for_the_exchange(text: Text) -> None:
    text.list_arrives()
    text.shared.want(["b.txt"])
    assert text.store.wanted == 0b111100
    text.shared.want(["a.txt", "a.txt"])
    assert text.store.wanted == 0b000011
    with pytest.raises(ConfigError, match=r"the run's text has no file c\.txt; expected one of its 2 files"):
        text.shared.want(["c.txt"])


def test_fetching_files_waits_for_the_list_and_for_them(text: Text) -> None:
    async def scene() -> None:
        fetching = asyncio.ensure_future(text.shared.fetch(["a.txt"]))
        await asyncio.sleep(1.0)
        text.list_arrives()
        await asyncio.sleep(1.0)
        assert text.store.wanted == 0b000011
        text.arrives(0, 2)
        await asyncio.sleep(1.0)
        assert not fetching.done()
        text.arrives(1)
        assert await fetching == text.shared.root

    run_virtual(scene())


def test_training_begins_with_the_first_pieces_and_reads_nothing_else(text: Text) -> None:
    stream = text.stream()
    assert not stream.is_ready()
    text.list_arrives()
    assert not stream.is_ready()
    assert text.store.wanted, "the files that it begins with"
    text.arrives(5, 1, 3)
    assert not stream.is_ready(), "four megabytes are enough, three are not"
    text.arrives(0)
    assert stream.is_ready()
    assert stream.has_begun
    for _ in range(20):
        assert text.is_in(stream.next_batch(), 0, 1, 3, 5)
    assert stream.position == 20 * BATCH


def test_training_takes_up_what_is_added_and_ends_with_the_stream_of_the_whole_text(text: Text) -> None:
    text.list_arrives()
    text.arrives(0, 1, 2, 3)
    stream = text.stream(position=1 << 40)
    assert stream.is_ready()
    stream.next_batch()
    text.arrives(4)
    assert stream.is_ready()
    assert all(text.is_in(stream.next_batch(), 0, 1, 2, 3) for _ in range(20)), "one piece more is not worth it"
    text.arrives(5)
    assert stream.is_ready()
    assert stream.is_whole
    whole = text.whole_stream(stream.position)
    for _ in range(5):
        assert torch.equal(stream.next_batch(), whole.next_batch())
    assert stream.position == whole.position


def test_a_peer_that_keeps_a_trace_waits_for_the_whole_text(text: Text) -> None:
    text.list_arrives()
    stream = text.stream(needs_all=True)
    text.arrives(0, 1, 2, 3, 4)
    assert not stream.is_ready()
    text.arrives(5)
    assert stream.is_ready()
    assert torch.equal(stream.next_batch(), text.whole_stream().next_batch())


def test_pieces_that_hold_no_whole_stretch_are_not_enough(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_text, "FIRST_BYTES", 1)
    text.list_arrives()
    stream = text.stream()
    text.arrives(2)
    assert stream.is_ready()
    assert text.is_in(stream.next_batch(), 2)


def test_peers_begin_with_different_files(text: Text) -> None:
    text.list_arrives()
    wanted = set()
    for number in range(8):
        stream = text.stream(peer=PeerId(bytes([number]) * 32))
        stream.is_ready()
        wanted.add(text.store.wanted)
    assert len(wanted) > 1


class Tokens:
    """A text of shards, each of one token, and a store into which a test puts its files."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "own"
        self.root.mkdir()
        (self.root / TOKENIZER_FILE).write_bytes(b"{}")
        shards = tuple(self._write(f"{number:03}.bin", number) for number in range(30))
        index = ShardIndex(
            vocabulary=1000,
            tokenizer=sha256(b"{}").hex(),
            end_token=None,
            bytes_per_token=3.5,
            sources=(Source(name="books", weight=1.0, shards=shards),),
            held_out=(self._write("held-out.bin", 999),),
        )
        (self.root / INDEX_FILE).write_bytes(index.encode())
        self.own = list_own_text(str(self.root))
        self.store = TextStore(folder / "store", self.own.digest)
        self.shared = SharedText(self.store)
        assert self.own.listed is not None
        assert self.store.adopt(self.own.listed.encode())

    def _write(self, name: str, token: int) -> Shard:
        raw = np.full(400, token, "<u2").tobytes()
        (self.root / name).write_bytes(raw)
        return Shard(name=name, tokens=400, sha256=sha256(raw).hex())

    def wanted_arrive(self) -> list[str]:
        """Fetch what is wanted, as the exchange does; return the names of the files."""
        assert self.own.listed is not None
        names = []
        for number, piece in enumerate(self.own.listed.pieces()):
            if self.store.wanted >> number & 1 and not self.store.held >> number & 1:
                assert self.store.keep(number, (self.root / self.own.listed.files[piece.file].name).read_bytes())
                names.append(self.own.listed.files[piece.file].name)
        return names

    def stream(self, opened: list[AnyText]) -> ArrivingText:
        return ArrivingText(
            self.shared,
            open_whole=lambda: TokenText(self.shared.root),
            stream_of=stream_at,
            opened=opened.append,
            batch=BATCH,
            context=CONTEXT,
            position=0,
            is_tokens=True,
            needs_all=True,
            peer=ME,
        )


def test_of_a_text_of_tokens_only_the_shards_of_the_next_windows_are_fetched(tmp_path: Path) -> None:
    tokens, opened = Tokens(tmp_path), []
    stream = tokens.stream(opened)
    assert not stream.is_ready()
    assert tokens.wanted_arrive() == [INDEX_FILE, TOKENIZER_FILE]
    assert not stream.is_ready()
    assert len(opened) == 1
    assert 1 <= len(tokens.wanted_arrive()) <= 8
    assert stream.is_ready()
    own = stream_at(TokenText(tokens.root), 0)
    waited = 0
    for turn in range(20):
        stream.batch = own.batch = (BATCH, 8 * BATCH, 1)[turn % 3]
        while not stream.is_ready():
            assert tokens.wanted_arrive()
            waited += 1
        assert torch.equal(stream.next_batch(), own.next_batch()), "the windows of a peer with its own copy"
    assert waited > 2, "several blocks"
    assert not tokens.shared.has(["held-out.bin"])


def test_the_shards_of_the_next_block_are_fetched_ahead(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    stream = tokens.stream([])
    for _ in range(20):
        if not stream.is_ready():
            tokens.wanted_arrive()
        tokens.wanted_arrive()
    while stream.position < 200:
        tokens.wanted_arrive()
        assert stream.is_ready(), "it never waits if shards come between two steps"
        stream.next_batch()
