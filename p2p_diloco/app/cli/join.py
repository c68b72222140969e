"""`p2p-diloco join`, `bootstrap` and `archive`: read all that a peer needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from p2p_diloco.app.cli.options import CommandContext, PeerOptions, StartOptions
from p2p_diloco.app.cli.output import print_to_stderr
from p2p_diloco.app.cli.peer_process import run_trainer
from p2p_diloco.app.cli.ranks import place_among_ranks, ranks_to_start, run_ranks
from p2p_diloco.config.invite import is_invite, parse_invite
from p2p_diloco.config.manifest import STANDARD_LIBRARY
from p2p_diloco.errors import ConfigError, NetworkError, NobodyAnswered
from p2p_diloco.session.peer_plan import PeerPlan, read_founding
from p2p_diloco.storage.export_folder import ExportPlan
from p2p_diloco.storage.run_folder import ARCHIVE_FOLDER, BOOTSTRAP_FOLDER
from p2p_diloco.wording import own_command

if TYPE_CHECKING:
    from p2p_diloco.codec.vectors import Vector
    from p2p_diloco.config.run_plan import RunPlan
    from p2p_diloco.ids import SpanId

EXPORTS_FOLDER = "exports"


def request_join(
    invite: str | None, options: StartOptions, around: CommandContext, *, found: Path | None = None
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
        own = around.settings(options.settings)
        return PeerPlan(settings=own, source=parse_invite(invite), until_round=options.until_round)
    if invite is not None:
        raise ConfigError("an invite joins an existing run, and --found starts a new one; use only one of them")
    own = around.settings(options.settings, founds=True)
    founding = read_founding(found, options.organiser_key, around.overrides, make_start=_make_start)
    data = founding.signed.manifest.data
    own_path = os.path.expanduser(data.path)
    is_here = data.share or (data.path != STANDARD_LIBRARY and glob(own_path))
    if own.data is None and is_here:
        own = own.model_copy(update={"data": own_path})  # of this user's own file, so it may be opened
    return PeerPlan(settings=own, source=founding, until_round=options.until_round)


def run_join(plan: PeerPlan, options: PeerOptions, around: CommandContext) -> int:
    """Run a trainer, or the ranks of its island; return the exit code."""
    place = place_among_ranks(around.environment)
    count = ranks_to_start(plan.settings) if place is None else 1
    if count == 1:
        with each_address_shown():
            return run_trainer(plan, options, place)
    return run_ranks(around.arguments, count, around.environment, with_parent=options.with_parent)


@contextmanager
def each_address_shown() -> Iterator[None]:
    """Print a line for each address that was tried in vain if nobody answers inside the block.

    Raises:
        NetworkError: nobody answered; the text names the command that checks more.
    """
    try:
        yield
    except NobodyAnswered as error:
        from p2p_diloco.app.cli.doctor_network import address_failure

        for failed in error.failures:
            print_to_stderr(str(address_failure(failed)))
        raise NetworkError(f"{error}; `{own_command('doctor')} INVITE` checks this machine and the way there") from None


def request_bootstrap(
    run: str,
    options: StartOptions,
    around: CommandContext,
    *,
    start: Path | None = None,
    own_folder: str = BOOTSTRAP_FOLDER,
) -> PeerPlan:
    """Read all that a bootstrap peer needs; `run` is a run file, or the invite of an existing run.

    Args:
        start: export or file with the initial tensors of the run.
        own_folder: folder of this peer in the state directory, unless the user names a state directory: the machine may
            also run a trainer.

    Raises:
        ConfigError: an option is invalid.
    """
    founds = not is_invite(run)
    if start is not None and not founds:
        raise ConfigError("--start only applies to a new run, and an invite is for an existing one; leave it out")
    own = around.settings(options.settings, founds=founds)
    if "state_directory" not in own.model_fields_set:
        own = own.model_copy(update={"state_directory": own.state_directory / own_folder})
    source = (
        read_founding(Path(run), options.organiser_key, around.overrides, start, _make_start)
        if founds
        else parse_invite(run)
    )
    return PeerPlan(settings=own, source=source, until_round=options.until_round)


def request_archive(
    run: str, options: StartOptions, around: CommandContext, *, into: Path | None, every: int, keep: int
) -> tuple[PeerPlan, ExportPlan]:
    """Read all that an archivist needs; `run` is the invite of a run, or the file of a run to found.

    Args:
        into: folder for the exports; None: a folder in the state directory.
        every: cycles from one export to the next.
        keep: number of exports to keep.
    Raises:
        ConfigError: an option is invalid.
    """
    plan = request_bootstrap(run, options, around, own_folder=ARCHIVE_FOLDER)
    folder = (into.expanduser() if into is not None else plan.settings.state_directory / EXPORTS_FOLDER).absolute()
    return plan, ExportPlan(folder=folder, every=every, keep=keep)


def _make_start(plan: RunPlan, own: str | None) -> dict[SpanId, Vector]:
    from p2p_diloco.app.models.run_model import make_start  # imported late: it imports torch

    return make_start(plan, own)
