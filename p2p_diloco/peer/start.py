"""One peer from its first word to its last: identity, transport, manifest, state, training, rounds, leaving."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias

from p2p_diloco.bandwidth.line import LineWatch
from p2p_diloco.config.address import parse_peer_address
from p2p_diloco.config.invite import MOST_NAMED, Invite, format_invite, fresh_invite
from p2p_diloco.config.manifest import SignedManifest, decode_signed_manifest
from p2p_diloco.config.settings import BOOTSTRAP_PORT, PeerSettings, bytes_per_second
from p2p_diloco.errors import ConfigError, FrameError, StateError
from p2p_diloco.ids import Digest, PeerId, SpanId, format_peer_id, short_peer_id
from p2p_diloco.node.manifest_fetch import fetch_manifest
from p2p_diloco.outer.vector import Vector
from p2p_diloco.peer.founding import read_start
from p2p_diloco.peer.run_plan import plan_run
from p2p_diloco.peer.session import PeerSession, SessionParts
from p2p_diloco.peer.stop import StopRequest
from p2p_diloco.peer.training import Training
from p2p_diloco.peer.waiting import result_before
from p2p_diloco.protocol.rules import explain_unlisted
from p2p_diloco.signing import SigningKey
from p2p_diloco.status.event_log import EVENTS_FILE
from p2p_diloco.status.reporter import PeerObserver, StatusReporter
from p2p_diloco.storage.checkpoint import CHECKPOINTS
from p2p_diloco.storage.identity import load_or_create_identity, lock_identity
from p2p_diloco.storage.kept_port import PORT_FILE, keep_port
from p2p_diloco.storage.run_folder import ADDRESSES_FILE, MANIFEST_FILE, RunFolder, run_folder
from p2p_diloco.transport.directory import Directory
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.libp2p_directory import Libp2pDirectory
from p2p_diloco.transport.link import Lane, Transport, TransportLimits

START_SECONDS = 60.0
BYTES_TO_TRAIN, BYTES_TO_HOLD = 12, 8
"""Of each parameter on the host, at the very least: the anchor and its momentum in float32, and what is trained."""

OpenDirectory: TypeAlias = Callable[[Sequence[str]], AbstractAsyncContextManager[Directory]]
"""Takes the addresses of peers to join through."""


class Network(Protocol):
    """A network for peers of one process, in place of libp2p."""

    @property
    def directory(self) -> Directory: ...

    def transport(self, peer: PeerId, *, run: Digest, limits: TransportLimits | None = None) -> Transport:
        """Return a transport of `peer`, not entered yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """What a command asks of a peer.

    Attributes:
        settings: this machine's choices.
        invite: of the run to join; None when the manifest is at hand.
        signed_manifest: of the run to found; None when it comes from the swarm.
        organiser_key: lets this peer found the run.
        founds_alone: write this peer into the manifest as the only founder: a second bootstrap that is started with the
            same run file founds another run then, with another id, and never a second history of this one.
        training: trains a model at this peer; None for a bootstrap peer, which does not train.
        start: a file of tensors to found the run from; None: the model that trains here, or the built-in one's seed.
        until_round: stop after this round, with all others; None: go on.
        network: None: libp2p.
    """

    settings: PeerSettings
    invite: Invite | None = None
    signed_manifest: SignedManifest | None = None
    organiser_key: SigningKey | None = None
    founds_alone: bool = False
    training: Training | None = None
    start: Path | None = None
    until_round: int | None = None
    network: Network | None = None

    @property
    def trains(self) -> bool:
        """Whether anything is trained here."""
        return self.training is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """How it ended: SHA-256 over φ and m of all spans in hexadecimal, and the last held-out loss of the anchor."""

    state_digest: str
    anchor_loss: float | None


class Refused(ConfigError):
    """This machine lacks something that the run needs. Nothing was begun, and no other peer knows of this one."""


@contextmanager
def nothing_left_if_refused(plan: PeerPlan) -> Iterator[None]:
    """Run a peer, and close its observer, inside the block: if it is `Refused`, the files that it made are removed.

    What was there before stays, and so does what others have put beside it meanwhile.
    """
    folder = run_folder(plan.settings.state_directory, _run_of(plan)).absolute()
    state = folder.parent
    files = (folder / MANIFEST_FILE, state / PORT_FILE, state / EVENTS_FILE, plan.settings.identity_file)
    new_files = [file for file in files if not os.path.exists(file)]
    new_folders = [place for place in (folder, *folder.parents) if not os.path.exists(place)]
    try:
        yield
    except Refused:
        with suppress(OSError):
            for file in new_files:
                file.unlink(missing_ok=True)
            for place in new_folders:
                place.rmdir()  # fails where somebody else has put something
        raise


async def run_peer(plan: PeerPlan, observer: PeerObserver, stop: StopRequest) -> PeerResult:
    """Be a peer until told to stop, or until the round that the plan names.

    Raises:
        ConfigError: the settings, the invite or the text do not fit.
        NetworkError: no bootstrap answered, the port is taken, the libp2p daemon died.
        StateError: the disk refuses or holds something broken.
    """
    settings = plan.settings
    _run_of(plan)
    start = _check_founder(plan)
    await _check_here(plan, plan.signed_manifest)
    try:
        settings.state_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StateError(
            f"cannot write {settings.state_directory}: {error.strerror}; choose another place with --state-directory"
        ) from None
    is_new = not settings.identity_file.exists()
    key = load_or_create_identity(settings.identity_file)
    with lock_identity(settings.identity_file):
        plan = _with_founder(plan, key.peer)
        run = _run_of(plan)
        folder = RunFolder(settings.state_directory, run)
        if not is_new:
            folder.least_incarnation = int(time.time())
        reporter = StatusReporter(observer=observer, unix_seconds=time.time)
        for complaint in plan.invite.complaints if plan.invite is not None else ():
            reporter.report("invite", complaint)
        async with _network(plan, run, key, reporter) as (transport, open_directory):
            line = LineWatch(
                transport.limits, transport.counters, lambda peer: transport.waiting_bytes(peer, Lane.BULK)
            )
            reporter.line = line
            known = _known_addresses(plan, folder, transport.peer, reporter)
            records: list[bytes] = []
            answered: list[PeerId] = []
            signed = await _manifest(plan, run, folder, transport, known, records, answered, reporter, stop)
            if signed is None:
                return PeerResult(state_digest="", anchor_loss=None)
            _check_listed(plan, signed, key.peer, reporter)
            if plan.signed_manifest is None:
                try:
                    await _check_here(plan, signed)
                except ConfigError as error:
                    raise Refused(str(error)) from None
            if plan.trains:
                reporter.report(
                    "checkpoints",
                    f"checkpoints go to {folder.path}; `p2p-diloco sample` and `p2p-diloco export` read the newest",
                )
            initial = tuple(address for addresses in known.values() for address in addresses)
            async with open_directory(initial) as directory:
                reporter.addresses = transport.listen_addresses()
                invite = fresh_invite(run, [reporter.addresses, *(known[peer] for peer in answered)])
                reporter.invite = format_invite(invite) if invite.bootstraps else ""
                if plan.organiser_key is not None or (not plan.trains and reporter.invite):
                    observer.listening(reporter.invite, own_model=bool(signed.manifest.model.tensors))
                parts = SessionParts(
                    settings=settings,
                    key=key,
                    organiser_key=plan.organiser_key,
                    training=plan.training,
                    until_round=plan.until_round,
                    signed=signed,
                    run=run,
                    folder=folder,
                    transport=transport,
                    directory=directory,
                    line=line,
                    known=known,
                    start=start,
                    records=tuple(records),
                    has_met_somebody=bool(answered),
                )
                session = PeerSession(parts, reporter, stop)
                await session.run()
    return PeerResult(state_digest=reporter.state_digest, anchor_loss=reporter.anchor_loss)


def _check_founder(plan: PeerPlan) -> dict[SpanId, Vector]:
    """Refuse before anybody is invited what nobody could join; return φ of the start file, if there is one."""
    start: dict[SpanId, Vector] = {}
    if plan.signed_manifest is not None:
        run = plan_run(plan.signed_manifest.manifest)
        if plan.start is not None:
            start = read_start(run, plan.start)
        elif run.built_in is None and not _brings_model(plan) and not _has_founded(plan):
            raise ConfigError(
                f'"{run.manifest.name}" trains a model of its own; found it from the loop that has the model '
                "(p2p_diloco.found), or give its first tensors: bootstrap run.toml --start model.safetensors"
            )
    if plan.organiser_key is not None and plan.settings.dial_out_only and not plan.settings.initial_peers:
        raise ConfigError(
            "others join through the peer that founds a run, and none can reach one that only dials out; "
            "leave --dial-out-only out"
        )
    return start


def _brings_model(plan: PeerPlan) -> bool:
    return plan.training is not None and plan.training.model is not None


def _has_founded(plan: PeerPlan) -> bool:
    """Return whether this peer has founded the run at an earlier start, and has the state on its disk."""
    settings = plan.settings
    if not settings.identity_file.exists():
        return False
    run = _run_of(_with_founder(plan, load_or_create_identity(settings.identity_file).peer))
    return any(run_folder(settings.state_directory, run).glob(CHECKPOINTS))


def _check_listed(plan: PeerPlan, signed: SignedManifest, me: PeerId, reporter: StatusReporter) -> None:
    """Refuse to wait for ever where the run lists who takes part and this peer is not on the list.

    A bootstrap peer goes on: it gives the manifest, and the directory shows whom else to ask.
    """
    trust, own = signed.manifest.trust, format_peer_id(me)
    if trust.mode == "open" or own in trust.peers:
        return
    if not plan.trains:
        if plan.organiser_key is None:
            reporter.report("trust", f"{explain_unlisted(me)}; until then this peer only hands out the manifest")
    elif plan.organiser_key is not None:
        raise ConfigError(
            f"{own} (this peer) is not on the list of its own run; add it to [trust] peers in the run file"
        )
    else:
        raise ConfigError(explain_unlisted(me))


async def _check_here(plan: PeerPlan, signed: SignedManifest | None) -> None:
    """Refuse what is not here: memory, a device, a text, the model; of the run only once its manifest is at hand."""
    if signed is not None:
        _check_memory(plan, signed)
    if plan.training is not None:
        await asyncio.to_thread(plan.training.check, plan.settings, signed)


def _check_memory(plan: PeerPlan, signed: SignedManifest) -> None:
    """Refuse what cannot be held here, before anything is: whoever signs a manifest may name any size."""
    parameters, has = plan_run(signed.manifest).num_parameters, memory_of_machine()
    needs = parameters * (BYTES_TO_TRAIN if plan.trains else BYTES_TO_HOLD)
    if needs > has:
        raise ConfigError(
            f"the model has {parameters:,} parameters and needs at least {needs / 1e9:.1f} GB of memory to "
            f"{'train' if plan.trains else 'be held'}; this machine has {has / 1e9:.1f} GB"
        )


def memory_of_machine() -> int:
    """Return the bytes of memory of this machine, in use or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _with_founder(plan: PeerPlan, me: PeerId) -> PeerPlan:
    """Return the plan of a founder with the manifest that says so.

    Raises:
        ConfigError: the run file names another founder.
    """
    if plan.signed_manifest is None or plan.organiser_key is None:
        return plan
    manifest, own = plan.signed_manifest.manifest, format_peer_id(me)
    if manifest.founder not in (None, own):
        raise ConfigError(
            f"the run names {manifest.founder} as its founder, and this peer is {own}; start it with the run's invite, "
            "then it introduces peers to a run that exists"
        )
    if manifest.founder is not None or not plan.founds_alone:
        return plan
    signed = manifest.model_copy(update={"founder": own}).sign(plan.organiser_key)
    return replace(plan, signed_manifest=signed)


def _run_of(plan: PeerPlan) -> Digest:
    if plan.signed_manifest is not None:
        return plan.signed_manifest.manifest.digest()
    if plan.invite is None:
        raise ConfigError("nothing to join: give an invite, or a run.toml to found a run with")
    return plan.invite.run


@asynccontextmanager
async def _network(
    plan: PeerPlan, run: Digest, key: SigningKey, reporter: StatusReporter
) -> AsyncIterator[tuple[Transport, OpenDirectory]]:
    """Go on line; yield the transport, and what opens the directory once the manifest is known."""
    limits = TransportLimits(
        upload_bytes_per_second=bytes_per_second(plan.settings.max_upload),
        download_bytes_per_second=bytes_per_second(plan.settings.max_download),
    )
    if (network := plan.network) is not None:
        async with network.transport(key.peer, run=run, limits=limits) as in_process:
            yield in_process, lambda initial: nullcontext(network.directory)
        return
    settings = await _with_port(plan, key, reporter)
    transport = Libp2pTransport(
        peer=key.peer,
        run=run,
        identity_path=settings.identity_file,
        host_maddrs=settings.host_maddrs,
        announce_maddrs=settings.announced_addresses(0),
        dial_out_only=settings.dial_out_only,
        map_port=not settings.no_port_mapping,
        limits=limits,
    )
    async with transport:
        yield transport, lambda initial: Libp2pDirectory(transport, initial_peers=initial)


async def _with_port(plan: PeerPlan, key: SigningKey, reporter: StatusReporter) -> PeerSettings:
    """Return the settings with the addresses to listen on, at the port that this peer had before unless they name one.

    A bootstrap peer begins at the port that people know, unless it was given hosts of its own.
    """
    settings = plan.settings
    if settings.dial_out_only:
        return settings
    is_told = settings.port is not None or bool(settings.host_maddrs)
    listening = await keep_port(
        settings.listen_addresses(0),
        folder=settings.state_directory,
        peer=key.peer,
        preferred=None if plan.trains or is_told else BOOTSTRAP_PORT,
        say=lambda text: reporter.report("port", text),
    )
    return settings.model_copy(update={"host_maddrs": listening, "port": None})


def _known_addresses(
    plan: PeerPlan, folder: RunFolder, me: PeerId, reporter: StatusReporter
) -> dict[PeerId, tuple[str, ...]]:
    """Return whom to ask first: the settings' initial peers, those of the invite, then peers of earlier starts."""
    invited = plan.invite.bootstraps if plan.invite is not None else ()
    known: dict[PeerId, tuple[str, ...]] = {}
    for address in (*plan.settings.initial_peers, *invited):
        peer = parse_peer_address(address)[1]
        known[peer] = (*known.get(peer, ()), address)
    kept = folder.recall_addresses()
    if not kept and folder.read(ADDRESSES_FILE) not in (None, b"{}"):
        reporter.report(
            "addresses", f"{folder.path / ADDRESSES_FILE} cannot be read; this start asks only whom it was given"
        )
    for peer, addresses in kept.items():
        known[peer] = (*known.get(peer, ()), *addresses)
    return {peer: tuple(dict.fromkeys(addresses)) for peer, addresses in known.items() if peer != me}


async def _manifest(
    plan: PeerPlan,
    run: Digest,
    folder: RunFolder,
    transport: Transport,
    known: dict[PeerId, tuple[str, ...]],
    records: list[bytes],
    answered: list[PeerId],
    reporter: StatusReporter,
    stop: StopRequest,
) -> SignedManifest | None:
    """Return the verified manifest: given, kept from an earlier start, or from the swarm; None: told to go before."""
    if plan.signed_manifest is not None:
        plan.signed_manifest.verify(run)
        # For whoever reads this folder later: its checkpoints say nothing of the model.
        folder.write(MANIFEST_FILE, plan.signed_manifest.encode())
        return plan.signed_manifest
    kept = folder.read(MANIFEST_FILE)
    if kept is not None:
        try:
            signed = decode_signed_manifest(kept)
        except FrameError as error:
            raise StateError(
                f"{folder.path / MANIFEST_FILE} is broken ({error}); move it away to fetch it anew"
            ) from None
        signed.verify(run)
        return signed
    reporter.phase = "fetching manifest"
    if not known:
        raise ConfigError("the invite names no bootstrap peer; add one with --initial-peers")
    names = [
        *map(short_peer_id, list(known)[:MOST_NAMED]),
        *([f"{len(known)} in all"] if len(known) > MOST_NAMED else []),
    ]
    reporter.report("asking", f"fetching the manifest from {', '.join(names)}")
    asking = fetch_manifest(transport, known, START_SECONDS, check=lambda raw: decode_signed_manifest(raw).verify(run))
    fetched = await result_before(asking, stop.wait_for_leave())
    if fetched is None:
        reporter.report("asking", "stopped before any peer answered")
        return None
    records += fetched.records
    answered.append(fetched.peer)
    invited = {parse_peer_address(address)[1] for address in (plan.invite.bootstraps if plan.invite else ())}
    place = "the invite names it" if fetched.peer in invited else "met before, the invite does not name it"
    reporter.report("asking", f"{short_peer_id(fetched.peer)} answered ({place})")
    signed = decode_signed_manifest(fetched.manifest)
    manifest = signed.verify(run)
    folder.write(MANIFEST_FILE, fetched.manifest)
    reporter.report("manifest", f'manifest of "{manifest.name}" verified against the invite')
    return signed
