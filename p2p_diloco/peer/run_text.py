"""The text of a run on this machine: the standard library's source, or the user's copy of the text or its tokens."""

from __future__ import annotations

from pathlib import Path

from p2p_diloco.config.manifest import STANDARD_LIBRARY, DataSection
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.storage.whole_file import replace_file
from p2p_diloco.text.data import BatchStream, Text, open_corpus
from p2p_diloco.text.token_shards import INDEX_FILE, TOKENIZER_FILE, TokenText, is_shard_folder

STARTS = 1 << 24
WINDOWS_OF_ONE_START = 1 << 40
"""Each start of a peer draws from its own positions, so that one that restarts often does not repeat the same text."""


def open_run_text(data: DataSection, own_copy: str | None) -> Text:
    """Open the text to train on.

    Args:
        data: the manifest's data section; its path is never opened, because it could name private files.
        own_copy: path of this machine's copy; None for the standard library.
    Raises:
        ConfigError: the run needs a copy and none is named, it cannot be read, or it differs from the run's text.
    """
    if own_copy is None and data.path != STANDARD_LIBRARY:
        raise ConfigError(f'this run trains on "{data.path}"; give the path of your copy of that text with --data PATH')
    corpus: Text
    if data.tokenizer is not None:
        assert own_copy is not None, "the standard library is a text of bytes"
        if not is_shard_folder(Path(own_copy)):
            raise ConfigError(
                f"this run trains on tokens, and {own_copy} has no {INDEX_FILE}; give a copy of the folder "
                "that the organiser made with p2p-diloco tokenize"
            )
        corpus = TokenText(Path(own_copy))
        if corpus.index.tokenizer != data.tokenizer:
            raise ConfigError(
                f"the tokens at {own_copy} were made with the tokenizer {corpus.index.tokenizer[:16]}…, the run "
                f"expects {data.tokenizer[:16]}…; get the folder that the organiser names"
            )
    else:
        corpus = open_corpus(own_copy, held_out_share=data.held_out)
    if data.fingerprint is not None and corpus.fingerprint.hex() != data.fingerprint:
        raise ConfigError(
            f"the text at {own_copy or 'the standard library'} has fingerprint {corpus.fingerprint.hex()[:16]}…, the "
            f"run expects {data.fingerprint[:16]}…; get the text that the organiser names"
        )
    return corpus


def open_fetched_text(data: DataSection, root: Path) -> Text:
    """Open a text that was fetched to `root`; it may have gaps, because its pieces were compared as they came.

    Raises:
        ConfigError: it is not of the kind that the run names.
    """
    if data.tokenizer is not None:
        return open_run_text(data, str(root))
    return open_corpus(str(root), held_out_share=data.held_out, is_arriving=True)


def keep_tokenizer(folder: Path, text: Text) -> None:
    """Write the tokenizer of a text of tokens into the run's folder, for `export`, which has only this folder."""
    if isinstance(text, TokenText):
        replace_file(folder / TOKENIZER_FILE, text.tokenizer())


def open_stream(corpus: Text, plan: RunPlan, run: Digest, peer: PeerId, incarnation: int) -> BatchStream:
    """Return a peer's stream of text windows, at the position of this start."""
    return open_own_stream(corpus, plan, run, peer, first_position(incarnation))


def first_position(incarnation: int) -> int:
    """Return the position of a start in its peer's stream of windows."""
    return (incarnation - 1) % STARTS * WINDOWS_OF_ONE_START


def open_own_stream(corpus: Text, plan: RunPlan, run: Digest, peer: PeerId, position: int) -> BatchStream:
    """Return a peer's stream of text windows, from `position` on."""
    return BatchStream(corpus, run, peer, batch=plan.inner.batch, context=plan.context, position=position)
