"""`p2p-diloco bootstrap` and `archive`: read all that a peer without training needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from p2p_diloco.cli.flags import EndFlags, SettingsFlags, Surroundings, settings_of
from p2p_diloco.config.invite import is_invite, parse_invite
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError
from p2p_diloco.peer.peer_plan import ExportPlan, PeerPlan, read_founding
from p2p_diloco.storage.run_folder import ARCHIVE_FOLDER, BOOTSTRAP_FOLDER

EXPORTS_FOLDER = "exports"


def request_bootstrap(
    run: str,
    *,
    key_path: Path | None,
    start: Path | None = None,
    settings: SettingsFlags,
    flags: EndFlags,
    around: Surroundings,
    own_folder: str = BOOTSTRAP_FOLDER,
) -> PeerPlan:
    """Read all that a bootstrap peer needs; `run` is a run file, or the invite of an existing run.

    Args:
        start: export or file with the initial tensors of the run.
        own_folder: folder of this peer in the state directory, unless the user names a state directory.

    Raises:
        ConfigError: an option is invalid.
    """
    if is_invite(run):
        if start is not None:
            raise ConfigError("--start only applies to a new run, and an invite is for an existing one; leave it out")
        own = _with_own_folder(settings_of(settings, around), own_folder)
        return PeerPlan(settings=own, source=parse_invite(run), until_round=flags.until_round)
    own = _with_own_folder(settings_of(settings, around.without_overrides()), own_folder)
    founding = read_founding(Path(run), key_path, around.overrides, start)
    return PeerPlan(settings=own, source=founding, until_round=flags.until_round)


def _with_own_folder(settings: PeerSettings, name: str) -> PeerSettings:
    """Give a peer that does not train its own folder unless one was named: the machine may also run a trainer."""
    if "state_directory" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"state_directory": settings.state_directory / name})


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
