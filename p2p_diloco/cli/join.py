"""`p2p-diloco join`: join a run and train."""

from __future__ import annotations

from glob import glob
from pathlib import Path

from p2p_diloco.cli.flags import PeerFlags, SettingsFlags, Surroundings, settings_of
from p2p_diloco.cli.peer_process import run_trainer
from p2p_diloco.cli.rank_group import ranks_to_start, run_ranks
from p2p_diloco.cli.rank_process import place_among_ranks
from p2p_diloco.config.invite import parse_invite
from p2p_diloco.config.manifest import STANDARD_LIBRARY
from p2p_diloco.errors import ConfigError
from p2p_diloco.peer.peer_plan import PeerPlan, read_founding


def request_join(
    invite: str | None,
    *,
    found: Path | None,
    key_path: Path | None,
    settings: SettingsFlags,
    flags: PeerFlags,
    around: Surroundings,
) -> PeerPlan:
    """Read all that a trainer needs: an invite, or with `found` the run file of a run to found.

    Raises:
        ConfigError: an option is missing or invalid.
    """
    if found is None:
        if invite is None:
            raise ConfigError("join needs an invite: the first line that a bootstrap peer prints, p2pdiloco://…")
        if invite.endswith(".toml"):
            raise ConfigError(f"{invite} is not an invite; to found a run from a file, use --found {invite}")
        own, source = settings_of(settings, around), parse_invite(invite)
        return PeerPlan(settings=own, source=source, until_round=flags.until_round)
    if invite is not None:
        raise ConfigError("an invite joins an existing run, and --found starts a new one; use only one of them")
    own = settings_of(settings, around.without_overrides())
    founding = read_founding(found, key_path, around.overrides)
    data = founding.signed.manifest.data
    is_here = data.share or (data.path != STANDARD_LIBRARY and glob(str(Path(data.path).expanduser())))
    if own.data is None and is_here:
        own = own.model_copy(update={"data": data.path})  # of this user's own file, so it may be opened
    return PeerPlan(settings=own, source=founding, until_round=flags.until_round)


def run_join(
    invite: str | None,
    *,
    found: Path | None,
    key_path: Path | None,
    settings: SettingsFlags,
    flags: PeerFlags,
    around: Surroundings,
) -> int:
    """Run a trainer; return the exit code."""
    plan = request_join(invite, found=found, key_path=key_path, settings=settings, flags=flags, around=around)
    place = place_among_ranks(around.environment)
    count = ranks_to_start(plan.settings) if place is None else 1
    if count == 1:
        return run_trainer(plan, flags, place)
    return run_ranks(around.arguments, count, around.environment, with_parent=flags.with_parent)
