"""`p2p-diloco archive`: follow a run without training, and export its model every few cycles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from p2p_diloco.cli.bootstrap import request_bootstrap
from p2p_diloco.cli.flags import EndFlags, SettingsFlags, Surroundings
from p2p_diloco.cli.peer_process import run_bootstrap_peer
from p2p_diloco.peer.peer_plan import ExportPlan, PeerPlan

ARCHIVE_FOLDER = "archive"
EXPORTS_FOLDER = "exports"


def request_archive(
    run: str,
    *,
    into: Path | None,
    every: int,
    keep: int,
    key_path: Path | None,
    settings: SettingsFlags,
    flags: EndFlags,
    around: Surroundings,
) -> PeerPlan:
    """Read all that an archivist needs; `run` is the invite of a run, or the file of a run to found.

    Args:
        into: folder for the exports; None: a folder in the state directory.
        every: cycles from one export to the next.
        keep: number of exports to keep.
    Raises:
        ConfigError: an option is invalid.
    """
    plan = request_bootstrap(
        run, key_path=key_path, settings=settings, flags=flags, around=around, own_folder=ARCHIVE_FOLDER
    )
    folder = (into.expanduser() if into is not None else plan.settings.state_directory / EXPORTS_FOLDER).absolute()
    return replace(plan, exports=ExportPlan(folder=folder, every=every, keep=keep))


def run_archive(
    run: str,
    *,
    into: Path | None,
    every: int,
    keep: int,
    key_path: Path | None,
    settings: SettingsFlags,
    flags: EndFlags,
    around: Surroundings,
) -> int:
    """Run an archivist; return the exit code."""
    plan = request_archive(
        run, into=into, every=every, keep=keep, key_path=key_path, settings=settings, flags=flags, around=around
    )
    return run_bootstrap_peer(plan, flags)
