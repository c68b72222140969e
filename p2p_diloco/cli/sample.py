"""`p2p-diloco sample`: text that the model of a run writes."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch

from p2p_diloco.cli.lost_stream import print_to_stderr
from p2p_diloco.errors import ConfigError
from p2p_diloco.peer.learnt_model import LearntModel, load_learnt_model
from p2p_diloco.training.model import model_of
from p2p_diloco.training.sampling import continue_text, readable_text

THREADS = 1
"""A byte is too little work to share, and a peer that trains beside this needs the other cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """As typed.

    Attributes:
        prompt: what to go on from.
        num_bytes: to write.
        temperature: 0 takes the likeliest byte.
        seed: of what is drawn; None: another one each time.
        state_directory: of the peer.
        run: which run in it, as the first digits of its id; None where there is one.
    """

    prompt: str
    num_bytes: int
    temperature: float
    seed: int | None
    state_directory: Path
    run: str | None


def print_sample(options: SampleOptions) -> int:
    """Print the prompt and what the model writes, byte by byte; return the exit code.

    Raises:
        ConfigError: an option does not fit, or no peer has run there.
        StateError: there is no checkpoint that can be read.
    """
    if options.num_bytes < 1:
        raise ConfigError(f"--bytes is {options.num_bytes}; expected at least 1")
    torch.set_num_threads(THREADS)
    learnt = load_learnt_model(options.state_directory, options.run)
    warn_of_refused(learnt)
    text = ""
    for text in sample_text(
        learnt,
        os.fsencode(options.prompt),  # whatever bytes the shell passed
        num_bytes=options.num_bytes,
        temperature=options.temperature,
        seed=secrets.randbits(63) if options.seed is None else options.seed,
    ):
        # A terminal of few characters shows a question mark for others.
        encoding = sys.stdout.encoding
        print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)
    print(end="" if text.endswith("\n") else "\n")
    return 0


def sample_text(learnt: LearntModel, prompt: bytes, *, num_bytes: int, temperature: float, seed: int) -> Iterator[str]:
    """Return the prompt and what the model writes after it, piece by piece, as people may see it."""
    written = continue_text(model_of(learnt.plan.shape, learnt.parameters), prompt, temperature=temperature, seed=seed)
    return filter(None, readable_text(chain(prompt, islice(written, num_bytes))))


def warn_of_refused(learnt: LearntModel) -> None:
    """Say on standard error which newer checkpoints could not be believed."""
    for sentence in learnt.refused:
        print_to_stderr(f"p2p-diloco: {sentence}; an older one is used")
