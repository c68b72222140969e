"""The text of a run on this machine: the standard library's source, or the user's copy of the text."""

from __future__ import annotations

from p2p_diloco.config.manifest import STANDARD_LIBRARY, DataSection
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.training.data import BatchStream, Corpus, open_corpus

STARTS = 1 << 24
WINDOWS_OF_ONE_START = 1 << 40
"""Each start of a peer draws from its own positions, so that one that restarts often does not repeat the same text."""


def open_run_text(data: DataSection, own_copy: str | None) -> Corpus:
    """Open the text to train on.

    Args:
        data: the manifest's data section; its path is never opened, because it could name private files.
        own_copy: path of this machine's copy; None for the standard library.
    Raises:
        ConfigError: the run needs a copy and none is named, it cannot be read, or it differs from the run's text.
    """
    if own_copy is None and data.path != STANDARD_LIBRARY:
        raise ConfigError(f'this run trains on "{data.path}"; give the path of your copy of that text with --data PATH')
    corpus = open_corpus(own_copy, held_out_share=data.held_out)
    if data.fingerprint is not None and corpus.fingerprint.hex() != data.fingerprint:
        raise ConfigError(
            f"the text at {own_copy or 'the standard library'} has fingerprint {corpus.fingerprint.hex()[:16]}…, the "
            f"run expects {data.fingerprint[:16]}…; get the text that the organiser names"
        )
    return corpus


def open_stream(corpus: Corpus, plan: RunPlan, run: Digest, peer: PeerId, incarnation: int) -> BatchStream:
    """Return a peer's stream of text windows, at the position of this start."""
    return open_own_stream(corpus, plan, run, peer, (incarnation - 1) % STARTS * WINDOWS_OF_ONE_START)


def open_own_stream(corpus: Corpus, plan: RunPlan, run: Digest, peer: PeerId, position: int) -> BatchStream:
    """Return a peer's stream of text windows, from `position` on."""
    return BatchStream(corpus, run, peer, batch=plan.inner.batch, context=plan.shape.context, position=position)
