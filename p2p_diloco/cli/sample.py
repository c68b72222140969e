"""`p2p-diloco sample` and `export`: use the model of a run, as text or as files for other programs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from p2p_diloco.cli.lost_stream import print_to_stderr
from p2p_diloco.config.new_file import check_new_folder, write_new_folder
from p2p_diloco.errors import ConfigError
from p2p_diloco.peer.exported_model import check_export, files_of, provenance_of, why_not_reloaded
from p2p_diloco.peer.learnt_model import LearntModel, build_learnt_model, load_learnt_model
from p2p_diloco.status.status_file import read_status
from p2p_diloco.text.tokenizer_files import NUM_BYTES
from p2p_diloco.training.sampling import continue_text, decoded, encode_prompt

THREADS = 1
"""One token is too little work to parallelise, and a peer training on this machine needs the other cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Options as typed.

    Attributes:
        prompt: text to continue.
        num_bytes: number of bytes of text to generate, unless the model ends the text before.
        temperature: 0 takes the most likely token.
        seed: seed of the sampling; None: a new one each time.
        state_directory: the peer's state directory.
        run: first digits of the run id; None if the directory holds only one run.
        model: this machine's copy of the base of a LoRA, or the Python function that the user agrees to run.
    """

    prompt: str
    num_bytes: int
    temperature: float
    seed: int | None
    state_directory: Path
    run: str | None
    model: str | None = None


def print_sample(options: SampleOptions) -> int:
    """Print the prompt and the generated text, as it is drawn; return the exit code.

    Raises:
        ConfigError: an option is invalid, no peer has run there, or the model cannot be built here or gives no logits.
        StateError: there is no readable checkpoint.
    """
    if options.num_bytes < 1:
        raise ConfigError(f"--bytes is {options.num_bytes}; expected at least 1")
    torch.set_num_threads(THREADS)
    learnt = load_learnt_model(options.state_directory, options.run)
    warn_about(learnt)
    text = ""
    for text in sample_text(
        learnt,
        os.fsencode(options.prompt),  # the exact bytes that the shell passed
        num_bytes=options.num_bytes,
        temperature=options.temperature,
        seed=secrets.randbits(63) if options.seed is None else options.seed,
        model=options.model,
    ):
        print(text, end="", flush=True)
    print(end="" if text.endswith("\n") else "\n")
    return 0


def sample_text(
    learnt: LearntModel, prompt: bytes, *, num_bytes: int, temperature: float, seed: int, model: str | None
) -> Iterator[str]:
    """Yield the prompt and the generated text, piece by piece, made readable."""
    tokenizer = learnt.tokenizer
    written = continue_text(
        build_learnt_model(learnt, model),
        encode_prompt(tokenizer, prompt),
        tokens=NUM_BYTES if tokenizer is None else tokenizer.vocabulary,
        ends=() if tokenizer is None else tokenizer.special().ends,
        temperature=temperature,
        seed=seed,
    )
    return filter(None, decoded(tokenizer, prompt, written, num_bytes=num_bytes))


def export_model(folder: Path, *, state_directory: Path, run: str | None, model: str | None = None) -> int:
    """Write the newest checkpoint in `state_directory` to a new `folder`; return the exit code.

    Args:
        model: this machine's copy of the base model of a LoRA, with which the export is reloaded.
    Raises:
        ConfigError: the folder exists, no peer has run in `state_directory`, or the run is ambiguous.
        StateError: there is no readable checkpoint, the folder cannot be written, or what transformers loads from it is
            not the run's model.
    """
    check_new_folder(folder)
    learnt = load_learnt_model(state_directory, run)
    warn_about(learnt)
    files = files_of(learnt, provenance_of(learnt, read_status(state_directory)))
    write_new_folder(folder, files, check=partial(check_export, learnt, model))
    print(f"wrote {folder}: {', '.join(files)}")
    print(why_not_reloaded(learnt.plan, model) or "reloaded with transformers: the logits are those of the run's model")
    print("README.md is the model card; it names no licence, so add yours before you publish")
    return 0


def warn_about(learnt: LearntModel) -> None:
    """Warn on standard error about newer checkpoints that were refused, and about a model that has learnt nothing."""
    for sentence in learnt.refused:
        print_to_stderr(f"p2p-diloco: {sentence}; using an older one")
    if learnt.rounds == 0:
        print_to_stderr(
            "p2p-diloco: the newest checkpoint is the start of the run, before anything was learnt; the next one comes "
            "within five minutes of training"
        )
