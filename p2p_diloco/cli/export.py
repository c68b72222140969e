"""`p2p-diloco export`: write the model of a run as files that other programs load."""

from __future__ import annotations

from pathlib import Path

from p2p_diloco.cli.sample import warn_about
from p2p_diloco.config.new_file import check_new_folder, write_new_folder
from p2p_diloco.peer.exported_model import files_of, provenance_of
from p2p_diloco.peer.learnt_model import load_learnt_model
from p2p_diloco.status.status_file import read_status


def export_model(folder: Path, *, state_directory: Path, run: str | None) -> int:
    """Write the newest checkpoint in `state_directory` to a new `folder`; return the exit code.

    Raises:
        ConfigError: the folder exists, no peer has run in `state_directory`, or the run is ambiguous.
        StateError: there is no readable checkpoint, or the folder cannot be written.
    """
    check_new_folder(folder)
    learnt = load_learnt_model(state_directory, run)
    warn_about(learnt)
    files = files_of(learnt, provenance_of(learnt, read_status(state_directory)))
    write_new_folder(folder, files)
    print(f"wrote {folder}: {', '.join(files)}")
    print("README.md is the model card; it names no licence, so add yours before you publish")
    return 0
