"""The checks of `doctor` that need the network: the addresses of an invite, its run, and the way back to this machine.

The peers are asked by a peer with a temporary identity, which asks for no membership. They answer its requests for the
manifest, for their clocks, and to dial it, as they do before a peer joins.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from p2p_diloco.app.cli.doctor import (
    IMPORT_SECONDS,
    LIMIT_SECONDS,
    Finding,
    failure,
    failure_of,
    folder_facts,
    in_thread,
    ok,
    warning,
)
from p2p_diloco.config.invite import Invite, parse_peer_address
from p2p_diloco.config.key_file import create_key_file
from p2p_diloco.config.manifest import RunManifest, VerifiedManifest, decode_signed_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import (
    ConfigError,
    DialFailure,
    FrameError,
    NotReached,
    P2PDilocoError,
    clean_text,
)
from p2p_diloco.ids import Digest, PeerId, short_peer_id
from p2p_diloco.memory.available import total_memory
from p2p_diloco.node.clock_keeper import MISSET_SECONDS
from p2p_diloco.node.manifest_fetch import LIKELIEST, fetch_manifest
from p2p_diloco.protocol.membership.reach import Network, network_of
from p2p_diloco.protocol.rules import explain_unlisted
from p2p_diloco.protocol.wire.messages import Ping, Pong, ReachReply, ReachRequest, decode_message, encode_message
from p2p_diloco.rate import counted
from p2p_diloco.session.network import transport_limits
from p2p_diloco.session.start import BYTES_OF_CHECKPOINT, BYTES_TO_TRAIN
from p2p_diloco.transport.addresses import place_in
from p2p_diloco.transport.hivemind_border import load_hivemind
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.link import Lane, Transport, TransportListener
from p2p_diloco.transport.reach_probe import probe_identity
from p2p_diloco.wording import format_bytes, format_seconds, install_line

DIAL_SECONDS, FETCH_SECONDS, ANSWER_SECONDS = 4.0, 8.0, 7.0
"""Time limits: of the dial of one address, of the manifest, and of the answers about clocks and reachability."""
MOST_ASKED = 3
"""Number of peers asked for their clocks and to dial this machine."""
_REMEDIES = dict(LIKELIEST)
_NO_RUN = Digest(bytes(32))


@dataclass(frozen=True, slots=True, kw_only=True)
class DialledAddress:
    """An address that was dialled: why it failed, or how long it took."""

    peer: PeerId
    address: str
    seconds: float = 0.0
    failure: NotReached | None = None


@dataclass(slots=True, kw_only=True)
class Visit:
    """The results of a visit to the swarm.

    Attributes:
        start_seconds: time that the libp2p daemon took to start.
        is_asked: whether any peer could be asked.
        manifest: that of the run, sent by `peer` within `fetch_seconds`; None with the reason in `refusal`.
        behind_seconds: by how much this machine's clock is behind those of peers.
        replies: answers to the request to dial this machine, by peer; `ports` are those that it listens on.
    """

    start_seconds: float
    ports: tuple[int, ...]
    is_asked: bool = False
    manifest: VerifiedManifest | None = None
    peer: PeerId | None = None
    fetch_seconds: float = 0.0
    refusal: P2PDilocoError | None = None
    behind_seconds: tuple[float, ...] = ()
    replies: dict[PeerId, ReachReply] = field(default_factory=dict)


class RunChecks:
    """The checks of one invite; without one, only that of the daemon.

    Args:
        addresses: the addresses to listen on; they are free.
    """

    def __init__(self, invite: Invite | None, settings: PeerSettings, addresses: tuple[str, ...]) -> None:
        self._invite = invite
        self._settings = settings
        self._addresses = addresses
        self._dials: list[asyncio.Task[DialledAddress]] = []
        self._visit: Visit | None = None

    async def dial(self, first_seconds: float) -> None:
        """Begin to dial every address of the invite and the settings; return when all are done, or after this time."""
        named = () if self._invite is None else (*self._settings.initial_peers, *self._invite.bootstraps)
        self._dials = [asyncio.ensure_future(dial(address)) for address in dict.fromkeys(named)]
        if self._dials:
            await asyncio.wait(self._dials, timeout=first_seconds)

    async def check_addresses(self) -> Sequence[Finding]:
        """Return a finding for each address, and one for all."""
        return check_addresses(await asyncio.gather(*self._dials)) if self._dials else ()

    async def check_swarm(self) -> Sequence[Finding]:
        """Start the daemon and ask the peers that answer; return what can be said without the run's model."""
        visit = self._visit = await self._ask()
        findings = [ok("daemon", f"the libp2p daemon started in {visit.start_seconds:.1f} s")]
        if visit.is_asked:
            findings.append(check_manifest(visit))
        if visit.manifest is not None:
            is_listed = visit.manifest.manifest.trust.mode == "listed"
            findings += [] if is_listed else [check_wall_clock(visit.behind_seconds)]
            findings += [] if is_listed else [check_reach(visit.replies, visit.ports)]
        return findings

    def run_checks(self, me: PeerId | None) -> list[tuple[str, Callable[[], Finding], float]]:
        """Return the checks of the run that was found, with their time limits; they may block.

        Args:
            me: this peer, if it has an identity.
        """
        if self._visit is None or self._visit.manifest is None:
            return []
        manifest, settings = self._visit.manifest.manifest, self._settings
        return [
            ("listed", lambda: check_listed(manifest, me), LIMIT_SECONDS),
            ("model", lambda: check_model(manifest, settings.model, _missing_packages(manifest)), LIMIT_SECONDS),
            ("run-memory", lambda: _memory_finding(plan_run(manifest), settings), IMPORT_SECONDS),
            (
                "run-disk",
                lambda: check_run_disk(plan_run(manifest), settings, folder_facts(settings.state_directory).free),
                LIMIT_SECONDS,
            ),
            ("text", lambda: _text_finding(manifest, settings.data), LIMIT_SECONDS),
        ]

    async def _ask(self) -> Visit:
        await in_thread(load_hivemind)  # not part of the time that the daemon takes
        began, run = time.monotonic(), self._invite.run if self._invite is not None else _NO_RUN
        with tempfile.TemporaryDirectory(prefix="p2p-diloco-doctor-") as folder:
            path = Path(folder) / "identity.key"
            transport = Libp2pTransport(
                peer=create_key_file(path).peer,
                run=run,
                identity_path=path,
                host_maddrs=self._addresses,
                dial_out_only=self._settings.dial_out_only,
                limits=transport_limits(self._settings),
            )
            async with transport:
                visit = Visit(start_seconds=time.monotonic() - began, ports=transport.listen_ports())
                known = await self._first_known()
                if known:
                    visit.is_asked = True
                    await ask_swarm(transport, known, visit)
        return visit

    async def _first_known(self) -> dict[PeerId, tuple[str, ...]]:
        """Wait for the first address that answers; return those that have answered by then, by peer."""
        for waiting in asyncio.as_completed(self._dials):
            if (await waiting).failure is None:
                break
        known: dict[PeerId, tuple[str, ...]] = {}
        for one in (task.result() for task in self._dials if task.done()):
            if one.failure is None:
                known[one.peer] = (*known.get(one.peer, ()), one.address)
        return known


async def dial(address: str) -> DialledAddress:
    """Dial a peer at one address, by a plain connection and the handshake that proves who answers."""
    peer, place, began = parse_peer_address(address)[1], place_in(address), time.monotonic()
    deadline = asyncio.get_running_loop().time() + DIAL_SECONDS
    if place is None:
        text = f"{address} is of a kind that cannot be dialled"
        return DialledAddress(peer=peer, address=address, failure=NotReached(text, DialFailure.NO_NAME))
    try:
        async with asyncio.timeout_at(deadline):
            # First in a thread that may be left behind: a loop waits at its end for a name server that does not answer.
            with suppress(OSError, UnicodeError):  # the dial says so again
                await in_thread(lambda: socket.getaddrinfo(*place))
        await probe_identity(peer, *place, deadline)
    except TimeoutError:
        text = f"{place[0]} does not resolve within {DIAL_SECONDS:.0f} s"
        return DialledAddress(peer=peer, address=address, failure=NotReached(text, DialFailure.NO_NAME))
    except NotReached as error:
        return DialledAddress(peer=peer, address=address, failure=error)
    except Exception as error:
        text = f"{address}: the check itself failed ({type(error).__name__}: {error})"
        return DialledAddress(peer=peer, address=address, failure=NotReached(text, DialFailure.NO_ROUTE))
    return DialledAddress(peer=peer, address=address, seconds=time.monotonic() - began)


async def ask_swarm(transport: Transport, known: dict[PeerId, tuple[str, ...]], visit: Visit) -> None:
    """Ask peers for the manifest, their clocks and a dial back, and note the answers in `visit`."""
    answers, loop, began = _Answers(), asyncio.get_running_loop(), time.monotonic()
    transport.serve(answers)
    try:
        fetched = await fetch_manifest(
            transport, known, FETCH_SECONDS, check=lambda raw: decode_signed_manifest(raw).verify(transport.run)
        )
        visit.peer, visit.fetch_seconds = fetched.peer, time.monotonic() - began
        visit.manifest = decode_signed_manifest(fetched.manifest).verify(transport.run)
    except P2PDilocoError as error:
        visit.refusal = error
        return
    if visit.manifest.manifest.trust.mode == "listed":
        return  # they answer listed peers only
    others = [peer for peer in known if peer != fetched.peer][: MOST_ASKED - 1]
    until = loop.time() + DIAL_SECONDS
    await asyncio.gather(*(transport.dial(peer, known[peer], until) for peer in others), return_exceptions=True)
    asked = sorted(transport.linked_peers() & known.keys())
    until = loop.time() + ANSWER_SECONDS
    for peer in asked:
        answers.asked_at[peer] = time.time()
        transport.post(peer, encode_message(Ping(nonce=1)), lane=Lane.CONTROL, deadline=until)
        if visit.ports:
            request = ReachRequest(nonce=1, ports=visit.ports[:1])
            transport.post(peer, encode_message(request), lane=Lane.CONTROL, deadline=until)
    awaited = len(asked) * (2 if visit.ports else 1)
    while answers.count < awaited and loop.time() < until and transport.linked_peers():
        answers.came.clear()
        try:
            async with asyncio.timeout_at(until):
                await answers.came.wait()
        except TimeoutError:
            break
    visit.behind_seconds = tuple(seconds for seconds in answers.behind.values() if seconds is not None)
    visit.replies = answers.replies


class _Answers(TransportListener):
    """Collects the answers of the peers that were asked."""

    def __init__(self) -> None:
        self.asked_at: dict[PeerId, float] = {}
        self.behind: dict[PeerId, float | None] = {}
        self.replies: dict[PeerId, ReachReply] = {}
        self.came = asyncio.Event()

    @property
    def count(self) -> int:
        return len(self.behind) + len(self.replies)

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        if peer not in self.asked_at:
            return
        try:
            message = decode_message(frame)
        except FrameError:
            return
        if isinstance(message, Pong):
            here = (self.asked_at[peer] + time.time()) / 2
            self.behind[peer] = message.clock_seconds - here if message.is_settled else None
        elif isinstance(message, ReachReply):
            self.replies[peer] = message
        self.came.set()


# -- checks of the addresses


def address_failure(failed: NotReached) -> Finding:
    """Return the finding for an address that cannot be dialled, and what to do about it."""
    return failure("address", str(failed), _REMEDIES[failed.failure])


def check_addresses(dialled: Sequence[DialledAddress]) -> list[Finding]:
    """Judge each address, and all of them: one that answers is enough, so the others are then warnings."""
    failed = [one.failure for one in dialled if one.failure is not None]
    num_answering = len(dialled) - len(failed)
    findings = []
    for one in dialled:
        if one.failure is None:
            place = "{}:{}".format(*(place_in(one.address) or ("", 0)))
            findings.append(ok("address", f"{place} is {short_peer_id(one.peer)}, in {1e3 * one.seconds:.0f} ms"))
        else:
            found = address_failure(one.failure)
            findings.append(warning(found.name, found.finding, found.remedy) if num_answering else found)
    text = f"{num_answering} of {len(dialled)} answer"
    if num_answering:
        return [*findings, ok("addresses", text)]
    cause = next(text for kind, text in LIKELIEST if any(one.failure is kind for one in failed))
    return [*findings, failure("addresses", text, f"most likely {cause}")]


# -- checks of the run


def check_manifest(visit: Visit) -> Finding:
    if visit.refusal is not None:
        return failure_of("manifest", visit.refusal)
    assert visit.manifest is not None, "it came, or was refused"
    assert visit.peer is not None, "it came from somebody"
    found = visit.manifest.manifest
    text = f'"{found.name}", format {found.format}, signed, from {short_peer_id(visit.peer)}'
    return ok("manifest", f"{text} in {visit.fetch_seconds:.1f} s")


def check_wall_clock(behind_seconds: Sequence[float]) -> Finding:
    """Compare this machine's clock with the run's time at several peers; the middle one counts."""
    if not behind_seconds:
        return warning("run-clock", "no peer has told the run's time", "look at the events `clock` after joining")
    seconds = sorted(behind_seconds)[len(behind_seconds) // 2]
    how = f"{format_seconds(abs(seconds))} {'behind' if seconds > 0 else 'ahead of'}"
    text = f"this machine's clock is {how} the run's time at {counted(len(behind_seconds), 'peer')}"
    if abs(seconds) > MISSET_SECONDS:
        return warning("run-clock", text, "set the clock right, or ask the others about theirs")
    return ok("run-clock", text)


def check_reach(replies: dict[PeerId, ReachReply], ports: Sequence[int]) -> Finding:
    """Judge what peers reply that were asked to dial this machine."""
    if not ports:
        return ok("reach", "outbound only, as configured")
    reached = sorted(
        (network_of(_host(reply)), _host(reply), reply.port) for reply in replies.values() if not reply.reason
    )
    if reached:
        network, host, port = reached[-1]
        where = {Network.WORLD: "", Network.SITE: ", within its own network", Network.MACHINE: ", on this machine"}[
            network
        ]
        return ok("reach", f"reachable at {host}:{port}{where}, by {counted(len(reached), 'peer')}")
    if not replies:
        text = f"no peer has answered within {ANSWER_SECONDS:.0f} s whether it can dial this machine"
        return warning("reach", text, "look at `reach` in `p2p-diloco status` after joining")
    reasons = dict.fromkeys(clean_text(reply.reason.decode("utf-8", "replace"), 200) for reply in replies.values())
    text = f"no peer could dial this machine ({', '.join(reasons)}); it trains, outbound only"
    return warning("reach", text, "to average for others too, let a TCP port in, and name it with --port")


def _host(reply: ReachReply) -> str:
    host = reply.host.decode("ascii", "replace")
    try:
        network_of(host)
    except ValueError:
        return "0.0.0.0"
    return host


def check_listed(manifest: RunManifest, me: PeerId | None) -> Finding:
    """Check whether the run takes this peer; None: it has no identity yet."""
    if manifest.trust.mode == "open":
        return ok("listed", "anyone with the invite may join")
    if me is None:
        remedy = "start `join` once: it makes an identity, and says which peer id to send to the organiser"
        listed = counted(len(manifest.trust.peers), "peer")
        return failure("listed", f"the run lists {listed}, and this one has no identity that can be read", remedy)
    if plan_run(manifest).rules.may_be_member(me):
        return ok("listed", f"{short_peer_id(me)} is one of {counted(len(manifest.trust.peers), 'listed peer')}")
    return failure_of("listed", ConfigError(explain_unlisted(me)))


def check_model(manifest: RunManifest, own: str | None, missing: Sequence[str]) -> Finding:
    """Check whether `join` can build the model of the run here.

    Args:
        own: the setting `model` of this machine.
        missing: packages that the model needs and this machine lacks.
    """
    section = manifest.model
    if section.is_own_loop:
        text = "the run trains its own model, which `join` cannot build"
        return warning("model", text, "join with p2p_diloco.join from a program that builds the same model")
    if missing:
        return failure("model", f"the model needs {' and '.join(missing)}", f"install the extra: {install_line('hf')}")
    if section.kind == "python" and own != section.source:
        text = f"the run trains a model of {section.source}, which would run that function on this machine"
        return failure("model", text, f"if you trust it and have its file, start with --model {section.source}")
    return ok("model", f"{section.kind}, {plan_run(manifest).num_parameters:,} parameters")


def check_run_disk(plan: RunPlan, settings: PeerSettings, free: int) -> Finding:
    """Compare the space for checkpoints and entries with what this peer may use; the bound has one more checkpoint."""
    checkpoints = (settings.keep_checkpoints + 1) * BYTES_OF_CHECKPOINT * plan.num_parameters
    needed = checkpoints + plan.rules.retained_cycles * sum(plan.rules.entry_bytes.values())
    has = free - (settings.disk_free or 0.0)
    has = min(has, settings.disk_cap) if settings.disk_cap is not None else has
    text = f"{format_bytes(needed)} for checkpoints and entries, {format_bytes(max(has, 0))} available"
    if has < checkpoints:
        return failure("run-disk", text, "free some space, or choose another place with --state-directory")
    if has < needed:
        return warning("run-disk", text, "the peer keeps fewer entries for others; free some space")
    return ok("run-disk", text)


def _missing_packages(manifest: RunManifest) -> list[str]:
    if manifest.model.kind != "hf":
        return []
    needed = {"transformers": importlib.util.find_spec("transformers")}
    if manifest.model.lora_rank:
        needed["peft"] = importlib.util.find_spec("peft")
    return [name for name, found in needed.items() if found is None]


def _memory_finding(plan: RunPlan, settings: PeerSettings) -> Finding:
    if plan.manifest.model.is_own_loop:
        needs, has = plan.num_parameters * BYTES_TO_TRAIN, total_memory()
        text = f"at least {format_bytes(needs)} of {format_bytes(has)}"
        return (
            ok("run-memory", text) if needs <= has else failure("run-memory", text, "take a machine with more memory")
        )
    from p2p_diloco.app.training.inner_loop import choose_device
    from p2p_diloco.app.training.memory_needs import check_memory, explain_tight, load_of, needed_bytes, room_here

    room = room_here(choose_device(settings.device))
    check_memory(plan, room)
    windows = 1 if room.device_free is not None else min(settings.windows_at_once or plan.inner.batch, plan.inner.batch)
    tight = explain_tight(plan, room, windows)
    if tight is not None:
        text, _, remedy = tight.rpartition("; ")
        return warning("run-memory", text, remedy)
    host, device = needed_bytes(load_of(plan), room, windows)
    on_device = f", {format_bytes(device)} of {format_bytes(room.device_free)} on {room.device}" if device else ""
    return ok("run-memory", f"likely {format_bytes(host)} of {format_bytes(room.host_free)} free{on_device}")


def _text_finding(manifest: RunManifest, own_copy: str | None) -> Finding:
    section = manifest.data
    if manifest.model.is_own_loop:
        return ok("text", "the training loop reads its own")
    if own_copy is None and section.share:
        return ok("text", "other peers send it")
    from p2p_diloco.app.text.run_text import open_run_text

    open_run_text(section, own_copy)
    which = own_copy or "the source of Python's standard library"
    return ok("text", f"{which} is {'the text of the run' if section.fingerprint else 'readable'}")
