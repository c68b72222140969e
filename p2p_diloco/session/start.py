"""Run one peer from start to end: identity, transport, manifest, state, training, rounds, leaving."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from textwrap import shorten
from typing import Any

from p2p_diloco.bandwidth.forecast import month_sentence
from p2p_diloco.bandwidth.uplink import UplinkWatch
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.invite import MOST_NAMED, format_invite, fresh_invite, parse_peer_address
from p2p_diloco.config.manifest import RunManifest, VerifiedManifest, decode_kept_manifest, decode_signed_manifest
from p2p_diloco.config.run_file import changed_keys
from p2p_diloco.config.run_plan import plan_run
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError, DaemonEnded, StateError
from p2p_diloco.guest.owner_files import TRAFFIC_FILE
from p2p_diloco.ids import Digest, PeerId, SpanId, format_peer_id, short_peer_id
from p2p_diloco.memory.available import total_memory
from p2p_diloco.node.manifest_fetch import fetch_manifest
from p2p_diloco.protocol.rules import explain_unlisted
from p2p_diloco.session.ending import StopRequest, result_before
from p2p_diloco.session.founding import read_buffers, read_start
from p2p_diloco.session.guest_watch import GuestWatch
from p2p_diloco.session.network import Libp2pNetwork
from p2p_diloco.session.peer_plan import Founding, PeerPlan
from p2p_diloco.session.session import PeerSession, SessionParts
from p2p_diloco.signing import SigningKey
from p2p_diloco.status.event_log import EVENTS_FILE
from p2p_diloco.status.reporter import PeerObserver, StatusReporter
from p2p_diloco.status.tensorboard import with_tensorboard
from p2p_diloco.storage.checkpoint import CHECKPOINTS
from p2p_diloco.storage.identity import PORT_FILE, load_or_create_identity, lock_identity, read_name
from p2p_diloco.storage.run_folder import (
    ADDRESSES_FILE,
    ARCHIVE_FOLDER,
    BOOTSTRAP_FOLDER,
    MANIFEST_FILE,
    ROSTERS_FILE,
    RunFolder,
    run_folder,
)
from p2p_diloco.storage.text_copy import OwnText, TextStore, open_own_text, text_folder
from p2p_diloco.transport.libp2p import ADVICE
from p2p_diloco.transport.link import Lane, Transport
from p2p_diloco.wording import own_command

JOIN_SECONDS = 20.0
"""Time after which a peer that nobody answers gives up its first start."""
OUTVOTED_CYCLES = 6
"""Cycles after which identities of one machine were most of the electorate (tests/simulator/test_electorate.py)."""
MOST_RESTARTS, RESTARTS_SECONDS = 3, 600.0
"""Number of times that an ended libp2p daemon is started again in so many seconds; after one more the peer ends."""
BYTES_TO_TRAIN, BYTES_TO_HOLD, BYTES_OF_CHECKPOINT = 12, 8, 8
"""Minimum host bytes per parameter: anchor and momentum in float32, and for training the parameters themselves."""
BYTES_TO_EXPORT = 20
"""The same for an archivist, which also holds those of the exported cycle, the parameters, and the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """The result of a peer: SHA-256 over φ and m of all spans in hexadecimal, and the anchor's last held-out loss."""

    state_digest: str
    anchor_loss: float | None


class Refused(ConfigError):
    """This machine lacks something that the run needs. Nothing was started, and no other peer lists this one."""


@contextmanager
def nothing_left_if_refused(plan: PeerPlan) -> Iterator[None]:
    """Remove the files that a peer created if it is `Refused`; run the peer and close its observer inside the block.

    Earlier files are kept, and so are files that others have added meanwhile.
    """
    folder = run_folder(plan.settings.state_directory, plan.source.run).absolute()
    state = folder.parent
    files = (
        folder / MANIFEST_FILE,
        state / PORT_FILE,
        state / EVENTS_FILE,
        state / TRAFFIC_FILE,
        plan.settings.identity_file,
    )
    new_files = [file for file in files if not os.path.exists(file)]
    new_folders = [place for place in (folder, *folder.parents) if not os.path.exists(place)]
    try:
        yield
    except Refused:
        with suppress(OSError):
            for file in new_files:
                file.unlink(missing_ok=True)
            for place in new_folders:
                place.rmdir()  # fails if the folder is not empty
        raise


async def run_peer(plan: PeerPlan, observer: PeerObserver, stop: StopRequest) -> PeerResult:
    """Run a peer until it is asked to stop, or until the last round of the plan.

    Raises:
        ConfigError: the settings, the invite or the text are invalid.
        NetworkError: no bootstrap answered, the port is taken, or the libp2p daemon died.
        StateError: the disk cannot be used, or a file is broken.
    """
    with with_tensorboard(plan.settings.tensorboard, observer) as watching:
        return await _run_peer(plan, watching, stop)


async def _run_peer(plan: PeerPlan, observer: PeerObserver, stop: StopRequest) -> PeerResult:
    settings = plan.settings
    start = _check_founder(plan)
    await _check_here(plan, plan.founding.signed.manifest if plan.founding is not None else None)
    try:
        settings.state_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StateError(
            f"cannot write {settings.state_directory}: {error.strerror}; choose another place with --state-directory"
        ) from None
    is_new = not settings.identity_file.exists()
    key = load_or_create_identity(settings.identity_file)
    with lock_identity(settings.identity_file):
        if plan.founding is not None:
            plan = replace(plan, source=plan.founding.by(key.peer))
        run = plan.source.run
        least = 1 if is_new else int(plan.clocks.wall())
        folder = RunFolder(settings.state_directory, run, least_incarnation=least)
        reporter = StatusReporter(observer=observer, unix_seconds=plan.clocks.wall, steady=plan.clocks.steady)
        _note_name(settings, reporter)
        for complaint in plan.invite.complaints if plan.invite is not None else ():
            reporter.report("invite", complaint)
        guest = GuestWatch(plan, run=run, peer=key.peer, reporter=reporter, stop=stop)
        async with guest.watching():
            goes_on, is_first, ended = True, True, deque[float](maxlen=MOST_RESTARTS)
            while goes_on and await guest.wait_until_online():
                refused = Refused if is_first else ConfigError  # later, there is something to keep
                try:
                    goes_on = await _take_part(plan, key, folder, guest, start, reporter, observer, stop, refused)
                except DaemonEnded as error:
                    now = plan.clocks.steady()
                    if stop.is_leaving or (len(ended) == MOST_RESTARTS and now - ended[0] < RESTARTS_SECONDS):
                        raise
                    ended.append(now)
                    reporter.report("daemon", f"{str(error).removesuffix(ADVICE)}; it is started again")
                is_first = False
                guest.go_offline()
    return PeerResult(state_digest=reporter.latest.state_digest, anchor_loss=reporter.latest.anchor_loss)


def _note_name(settings: PeerSettings, reporter: StatusReporter) -> None:
    try:
        reporter.note(name=read_name(settings.state_directory))
    except StateError as error:
        reporter.report("identity", f"this peer has no name: {error}")


async def _take_part(
    plan: PeerPlan,
    key: SigningKey,
    folder: RunFolder,
    guest: GuestWatch,
    start: dict[SpanId, Vector],
    reporter: StatusReporter,
    observer: PeerObserver,
    stop: StopRequest,
    refused: type[ConfigError],
) -> bool:
    """Be on the network until this peer is asked to stop, or until a limit of its machine's owner takes it offline.

    Returns:
        Whether it only went offline, and takes part again once the limit allows.
    """
    run, settings = plan.source.run, guest.settings
    network = plan.network or Libp2pNetwork()
    online = network.online(settings, key, run, trains=plan.trains, notify=partial(reporter.report, "port"))
    async with online as (transport, open_directory), as_end_of_daemon(transport):
        guest.come_online(transport)
        line = UplinkWatch(transport.limits, transport.counters, lambda peer: transport.waiting_bytes(peer, Lane.BULK))
        known = _known_addresses(plan, folder, transport.peer, reporter)
        found = await _find_manifest(plan, folder, transport, known, reporter, stop)
        if found is None:
            return False
        verified, answered = found.verified, found.answered
        _check_listed(plan, verified.manifest, key.peer, reporter)
        if plan.founding is None:
            try:
                await _check_here(plan, verified.manifest)
                text = await _open_text(plan, verified.manifest, reporter)
            except ConfigError as error:
                raise refused(str(error)) from None
        else:
            text = await _open_text(plan, verified.manifest, reporter)
        await _ask_quota(plan, guest, verified.manifest)
        if plan.trains:
            reporter.report(
                "checkpoints",
                f"checkpoints go to {folder.path}; `p2p-diloco sample` and `p2p-diloco export` read the newest",
            )
        elif plan.founding is not None:
            sentence, _ = month_sentence(plan_run(verified.manifest).rules)
            reporter.report("traffic", f"{sentence}, on every machine that trains")
        initial = tuple(address for addresses in known.values() for address in addresses)
        async with open_directory(initial) as directory:
            addresses = transport.listen_addresses()
            invite = fresh_invite(run, [addresses, *([known[answered]] if answered is not None else [])])
            is_first, invite_line = not reporter.latest.invite, format_invite(invite) if invite.bootstraps else ""
            reporter.note(addresses=addresses, invite=invite_line)
            if is_first and (plan.founding is not None or (not plan.trains and invite_line)):
                observer.listening(invite_line, own_model=verified.manifest.model.is_own_loop)
            parts = SessionParts(
                plan=plan,
                key=key,
                verified=verified,
                folder=folder,
                transport=transport,
                directory=directory,
                line=line,
                guest=guest,
                known=known,
                start=start,
                records=found.records,
                has_met_somebody=answered is not None,
                text=text,
                name=reporter.latest.name,
            )
            return await PeerSession(parts, reporter, stop).run()


@asynccontextmanager
async def as_end_of_daemon(transport: Transport) -> AsyncIterator[None]:
    """Raise `DaemonEnded` for any error inside the block that follows from the end of the daemon."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if error is transport.lost or not isinstance(transport.lost, DaemonEnded):
            raise
        raise transport.lost from error


async def _ask_quota(plan: PeerPlan, guest: GuestWatch, manifest: RunManifest) -> None:
    """Ask the machine's owner for a monthly quota, now that the traffic of the run is known; once."""
    if plan.ask_quota is None or plan.invite is None or not plan.trains or guest.has_asked_for_quota:
        return
    sentence, month_bytes = month_sentence(plan_run(manifest).rules)
    answer = await asyncio.to_thread(plan.ask_quota, sentence, month_bytes)
    if answer:
        guest.keep_limit("monthly_quota", answer)


def _check_founder(plan: PeerPlan) -> dict[SpanId, Vector]:
    """Refuse to found a run that nobody could join; return φ of the start file, if there is one."""
    founding = plan.founding
    if founding is None:
        return {}
    if not _has_founded(plan.settings, founding):
        _check_unchanged(plan, founding)
    run, start = plan_run(founding.signed.manifest), {}
    if founding.start is not None and (
        run.manifest.model.start is None or founding.start.exists() or not _has_founded(plan.settings, founding)
    ):
        start = read_start(run, founding.start)
        if plan.training is not None and plan.trains and run.manifest.model.start is not None:
            plan.training.continue_buffers(read_buffers(run, founding.start))
    elif run.manifest.model.is_own_loop and not _brings_model(plan) and not _has_founded(plan.settings, founding):
        raise ConfigError(
            f'"{run.manifest.name}" trains its own model; found it from the training loop of the model '
            "(p2p_diloco.found), or give its initial tensors: bootstrap run.toml --start model.safetensors"
        )
    elif not plan.trains and founding.make_start is None:
        raise ConfigError(
            f'the founder of "{run.manifest.name}" has neither a model nor initial tensors; give Founding.make_start, '
            "which builds the untrained model, or Founding.start, a file"
        )
    if plan.settings.dial_out_only and not plan.settings.initial_peers:
        raise ConfigError(
            "other peers join through the founder of a run, and cannot reach it if it only dials out; "
            "remove --dial-out-only"
        )
    return start


def _check_unchanged(plan: PeerPlan, founding: Founding) -> None:
    """Refuse a run file that was edited after the run was founded here: it would silently found another run.

    A run has one organiser, name and time of writing; a file that differs in these is of another run. A bootstrap peer
    or an archivist of this machine may have founded it.
    """
    new, state, identity = founding.signed.manifest, plan.settings.state_directory, plan.settings.identity_file
    if identity.exists():
        new = founding.by(load_or_create_identity(identity).peer).signed.manifest
    machine = state.parent if state.name in (BOOTSTRAP_FOLDER, ARCHIVE_FOLDER) else state
    folders = (state, machine, machine / BOOTSTRAP_FOLDER, machine / ARCHIVE_FOLDER)
    for path in sorted(path for folder in dict.fromkeys(folders) for path in folder.glob(f"*/{MANIFEST_FILE}")):
        try:
            old = decode_kept_manifest(path.read_bytes(), path, "").manifest
        except (OSError, StateError):
            continue  # of another version, or broken: not known to be of this run
        is_same = (old.organiser, old.name, old.created) == (new.organiser, new.name, new.created)
        has_begun = (path.parent / ROSTERS_FILE).exists() or any(path.parent.glob(CHECKPOINTS))
        if is_same and has_begun and (changed := changed_keys(old, new)):
            is_own = path.parent.parent == state
            holds_learnt = plan.keeps_state if is_own else path.parent.parent.name != BOOTSTRAP_FOLDER
            raise _edited_run(old, changed, path.parent, holds_learnt=holds_learnt)


def _edited_run(
    old: RunManifest, changed: dict[str, tuple[Any, Any]], folder: Path, *, holds_learnt: bool
) -> ConfigError:
    state = folder.parent
    before, after = changed.pop("founder", (None, None))
    if not changed:
        return ConfigError(
            f'{state} holds the run "{old.name}" of this file, founded by {before}, and this peer is '
            f"{after or 'a new one'}; start it with that identity or with the run's invite, or found another run with "
            "another --state-directory"
        )
    edits = ", ".join(f"{key} from {_shown(before)} to {_shown(after)}" for key, (before, after) in changed.items())
    remedy = ""
    if not any(key.startswith("model.") for key in changed):  # a run that continues another keeps its model
        flags = [word for key, (_, new) in changed.items() if new is not None for word in (f"--{key}", _typed(new))]
        path = next(name for name in (f"run{number}.toml" for number in count(2)) if not os.path.exists(name))
        source, where = (str(state), "") if holds_learnt else ("STATE", "; STATE: that of a peer that trains")
        command = own_command("new", path, "--continue", source, "--run", folder.name, *flags)
        remedy = f"make a run that continues it ({command}{where}), "
    return ConfigError(
        f'values of "{old.name}" were changed after the run began in {state} ({edits}), and a run keeps its values; '
        f"undo that to go on with it, {remedy}or found another one with another --state-directory"
    )


def _shown(value: object) -> str:
    return "not set" if value is None else shorten(json.dumps(value, ensure_ascii=False), 60, placeholder=" …")


def _typed(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _brings_model(plan: PeerPlan) -> bool:
    return plan.training is not None and plan.training.model is not None


def _has_founded(settings: PeerSettings, founding: Founding) -> bool:
    """Return whether this peer has founded the run before, and has its state on disk."""
    if not settings.identity_file.exists():
        return False
    run = founding.by(load_or_create_identity(settings.identity_file).peer).run
    return any(run_folder(settings.state_directory, run).glob(CHECKPOINTS))


def _check_listed(plan: PeerPlan, manifest: RunManifest, me: PeerId, reporter: StatusReporter) -> None:
    """Refuse to start if the run lists its peers and this peer is not on the list; it would wait for ever.

    A bootstrap peer starts anyway: it serves the manifest, and the directory shows other peers. So does an archivist,
    which is never a member.
    """
    trust, own = manifest.trust, format_peer_id(me)
    if trust.mode == "open" and plan.trains and plan.founding is None:
        seconds = OUTVOTED_CYCLES * plan_run(manifest).rules.cycle_seconds
        text = (
            "open run: anyone with the invite can join, and one laptop with many keys can outvote all in "
            f"{OUTVOTED_CYCLES} cycles ({seconds:.0f} s); train with people you trust"
        )
        reporter.report("trust", text)
    if trust.mode == "open" or own in trust.peers:
        return
    if not plan.trains:
        if plan.founding is None and not plan.keeps_state:
            reporter.report("trust", f"{explain_unlisted(me)}; until then this peer only serves the manifest")
    elif plan.founding is not None:
        raise ConfigError(
            f"{own} (this peer) is not on the list of its own run; add it to [trust] peers in the run file"
        )
    else:
        raise ConfigError(explain_unlisted(me))


async def _check_here(plan: PeerPlan, manifest: RunManifest | None) -> None:
    """Check device, memory, text and model; what depends on the run only once its manifest is known."""
    if plan.training is not None:  # first, because the built-in training knows more of its memory
        await asyncio.to_thread(plan.training.check, plan.settings, manifest)
    if manifest is not None and (plan.training is None or not plan.training.checks_memory):
        _check_memory(plan, manifest)


async def _open_text(plan: PeerPlan, manifest: RunManifest, reporter: StatusReporter) -> OwnText | TextStore | None:
    """Return this machine's copy of a text that the run shares, or the folder to fetch it into; None: neither."""
    data, settings = manifest.data, plan.settings
    if data.files is None or (plan.training is not None and not plan.training.reads_text):
        return None
    digest = Digest(bytes.fromhex(data.files))
    if settings.data is not None:
        reporter.report("text", f"comparing {settings.data} with the run's list of files")
        return await asyncio.to_thread(open_own_text, settings.data, digest, settings.state_directory)
    if plan.trains and plan.founding is not None:
        raise ConfigError("this run shares its text, and its founder must have a copy; name it with --data PATH")
    if plan.keeps_state:
        folder, is_bytes = text_folder(settings.state_directory, digest), data.tokenizer is None
        most = _room_for_text(settings, manifest)
        return await asyncio.to_thread(partial(TextStore, folder, digest, most_bytes=most, needs_all=is_bytes))
    reporter.report("text", "this peer has no copy of the run's text, so it sends it to nobody; name one with --data")
    return None


def _room_for_text(settings: PeerSettings, manifest: RunManifest) -> int | None:
    """Return the space that a fetched text may take within the owner's limits of the disk; None without limits."""
    rooms = []
    if settings.disk_cap is not None:
        # A checkpoint is written before the old one is removed.
        rooms.append(int(settings.disk_cap) - 2 * BYTES_OF_CHECKPOINT * plan_run(manifest).num_parameters)
    if settings.disk_free is not None:
        rooms.append(shutil.disk_usage(settings.state_directory).free - int(settings.disk_free))
    return max(min(rooms), 0) if rooms else None


def _check_memory(plan: PeerPlan, manifest: RunManifest) -> None:
    """Refuse a model that does not fit into memory before allocating it, since a manifest can name any size."""
    parameters, has = plan_run(manifest).num_parameters, total_memory()
    each, purpose = (0 if plan.founding is None else BYTES_TO_HOLD), "held"
    if plan.keeps_state:
        each, purpose = (BYTES_TO_TRAIN, "trained") if plan.trains else (BYTES_TO_EXPORT, "exported")
    needs = parameters * each
    if needs > has:
        raise ConfigError(
            f"the model has {parameters:,} parameters and needs at least {needs / 1e9:.1f} GB of memory to be "
            f"{purpose}; this machine has {has / 1e9:.1f} GB"
        )


def _known_addresses(
    plan: PeerPlan, folder: RunFolder, me: PeerId, reporter: StatusReporter
) -> dict[PeerId, tuple[str, ...]]:
    """Return the peers to ask, in order: initial peers from the settings, from the invite, then from earlier starts."""
    invited = plan.invite.bootstraps if plan.invite is not None else ()
    known: dict[PeerId, tuple[str, ...]] = {}
    for address in (*plan.settings.initial_peers, *invited):
        peer = parse_peer_address(address)[1]
        known[peer] = (*known.get(peer, ()), address)
    kept = folder.recall_addresses()
    if not kept and folder.read(ADDRESSES_FILE) not in (None, b"{}"):
        reporter.report("addresses", f"{folder.path / ADDRESSES_FILE} cannot be read; using only the given addresses")
    for peer, addresses in kept.items():
        known[peer] = (*known.get(peer, ()), *addresses)
    return {peer: tuple(dict.fromkeys(addresses)) for peer, addresses in known.items() if peer != me}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The manifest of the run, and what came with it.

    Attributes:
        answered: the peer that sent it; None if it was on this machine.
        records: records of peers to dial.
    """

    verified: VerifiedManifest
    answered: PeerId | None = None
    records: tuple[bytes, ...] = ()


async def _find_manifest(
    plan: PeerPlan,
    folder: RunFolder,
    transport: Transport,
    known: dict[PeerId, tuple[str, ...]],
    reporter: StatusReporter,
    stop: StopRequest,
) -> _Found | None:
    """Return the manifest: given, saved by an earlier start, or fetched from the swarm; None if stopped before."""
    run = plan.source.run
    if plan.founding is not None:
        verified = plan.founding.signed.verify(run)
        # Readers of this folder need it: the checkpoints do not describe the model.
        folder.write(MANIFEST_FILE, verified.encoded)
        return _Found(verified=verified)
    kept = folder.read(MANIFEST_FILE)
    if kept is not None:
        path = folder.path / MANIFEST_FILE
        signed = decode_kept_manifest(kept, path, "move it away to fetch it again")
        return _Found(verified=signed.verify(run))
    reporter.note(phase="fetching manifest")
    if not known:
        raise ConfigError("the invite names no bootstrap peer; add one with --initial-peers")
    names = [
        *map(short_peer_id, list(known)[:MOST_NAMED]),
        *([f"{len(known)} in all"] if len(known) > MOST_NAMED else []),
    ]
    reporter.report("asking", f"fetching the manifest from {', '.join(names)}")
    asking = fetch_manifest(transport, known, JOIN_SECONDS, check=lambda raw: decode_signed_manifest(raw).verify(run))
    fetched = await result_before(asking, stop.wait_for_leave())
    if fetched is None:
        reporter.report("asking", "stopped before any peer answered")
        return None
    invited = {parse_peer_address(address)[1] for address in (plan.invite.bootstraps if plan.invite else ())}
    place = "named in the invite" if fetched.peer in invited else "known from before, not named in the invite"
    reporter.report("asking", f"{short_peer_id(fetched.peer)} answered ({place})")
    verified = decode_signed_manifest(fetched.manifest).verify(run)
    folder.write(MANIFEST_FILE, verified.encoded)
    reporter.report("manifest", f'manifest of "{verified.manifest.name}" verified against the invite')
    return _Found(verified=verified, answered=fetched.peer, records=tuple(fetched.records))
