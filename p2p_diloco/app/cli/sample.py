"""`p2p-diloco sample` and `export`: use the model of a run, as text or as files for other programs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from p2p_diloco.app.cli.output import print_to_stderr
from p2p_diloco.app.models.exported_model import check_export, files_of, provenance_of, why_not_reloaded
from p2p_diloco.app.models.run_model import build_learnt_model, tokenizer_of
from p2p_diloco.app.models.sampling import continue_text, decoded, encode_prompt
from p2p_diloco.app.text.tokenizer_files import NUM_BYTES
from p2p_diloco.config.new_file import check_new_folder, write_new_folder
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.rate import check_count
from p2p_diloco.session.learnt_model import LearntModel, load_learnt_model
from p2p_diloco.status.status_file import read_status

THREADS = 1
"""One token is too little work to parallelise, and a peer training on this machine needs the other cores."""


def print_sample(
    prompt: str, settings: PeerSettings, run: str | None, *, num_bytes: int, temperature: float, seed: int | None
) -> int:
    """Print the prompt and the generated text, as it is drawn; return the exit code.

    Args:
        settings: where the peer's state is, and this machine's copy of the model.
        run: first digits of the run id; None if the directory holds only one run.
        num_bytes: number of bytes of text to generate, unless the model ends the text before.
        temperature: 0 takes the most likely token.
        seed: seed of the sampling; None: a new one each time.
    Raises:
        ConfigError: an option is invalid, no peer has run there, or the model cannot be built here or gives no logits.
        StateError: there is no readable checkpoint.
    """
    check_count(num_bytes, "--bytes")
    torch.set_num_threads(THREADS)
    learnt = load_learnt_model(settings.state_directory, run)
    warn_about(learnt)
    text = ""
    for text in sample_text(
        learnt,
        os.fsencode(prompt),  # the exact bytes that the shell passed
        num_bytes=num_bytes,
        temperature=temperature,
        seed=secrets.randbits(63) if seed is None else seed,
        model=settings.model,
    ):
        print(text, end="", flush=True)
    print(end="" if text.endswith("\n") else "\n")
    return 0


def sample_text(
    learnt: LearntModel, prompt: bytes, *, num_bytes: int, temperature: float, seed: int, model: str | None
) -> Iterator[str]:
    """Yield the prompt and the generated text, piece by piece, made readable."""
    tokenizer = tokenizer_of(learnt)
    written = continue_text(
        build_learnt_model(learnt, model),
        encode_prompt(tokenizer, prompt),
        tokens=NUM_BYTES if tokenizer is None else tokenizer.vocabulary,
        ends=() if tokenizer is None else tokenizer.special().ends,
        temperature=temperature,
        seed=seed,
    )
    return filter(None, decoded(tokenizer, prompt, written, num_bytes=num_bytes))


def export_model(folder: Path, settings: PeerSettings, run: str | None) -> int:
    """Write the newest checkpoint of a peer to a new `folder`; return the exit code.

    Args:
        settings: as for `print_sample`; the export is reloaded with the copy of the model.
        run: as for `print_sample`.
    Raises:
        ConfigError: the folder exists, no peer has run in the state directory, or the run is ambiguous.
        StateError: there is no readable checkpoint, the folder cannot be written, or what transformers loads from it is
            not the run's model.
    """
    check_new_folder(folder)
    learnt = load_learnt_model(settings.state_directory, run)
    warn_about(learnt)
    files = files_of(learnt, provenance_of(learnt, read_status(settings.state_directory)))
    write_new_folder(folder, files, check=partial(check_export, learnt, settings.model))
    print(f"wrote {folder}: {', '.join(files)}")
    print(
        why_not_reloaded(learnt.plan, settings.model)
        or "reloaded with transformers: the logits are those of the run's model"
    )
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
