"""`p2p-diloco join`: train along with a run."""

from __future__ import annotations

from pathlib import Path

from p2p_diloco.cli.bootstrap import signed_run
from p2p_diloco.cli.flags import PeerFlags, SettingsFlags, Surroundings, settings_of
from p2p_diloco.cli.peer_process import PeerRequest, run_requested_peer
from p2p_diloco.config.invite import parse_invite
from p2p_diloco.errors import ConfigError


def request_join(
    invite: str | None,
    *,
    found: Path | None,
    key_path: Path | None,
    settings: SettingsFlags,
    flags: PeerFlags,
    around: Surroundings,
) -> PeerRequest:
    """Read all that a trainer needs: an invite, or with `found` a run file to found the run itself.

    Raises:
        ConfigError: something is missing or does not fit.
    """
    if found is None:
        if invite is None:
            raise ConfigError("join needs an invite: the first line that a bootstrap peer prints, p2pdiloco://…")
        if invite.endswith(".toml"):
            raise ConfigError(f"{invite} is no invite; to found the run of a file, type --found {invite}")
        return PeerRequest(settings=settings_of(settings, around), flags=flags, invite=parse_invite(invite))
    if invite is not None:
        raise ConfigError("an invite joins a run that exists and --found begins one; keep one of them")
    own = settings_of(settings, around.without_overrides())
    signed, key = signed_run(found, key_path, around)
    return PeerRequest(settings=own, flags=flags, signed_manifest=signed, organiser_key=key)


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
    return run_requested_peer(
        request_join(invite, found=found, key_path=key_path, settings=settings, flags=flags, around=around)
    )
