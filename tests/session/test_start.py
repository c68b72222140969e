"""From an invite to a running peer, over a memory network."""

from __future__ import annotations

import asyncio
import shutil
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_model
from session_stage import Watcher
from small_run import CLOCK_START, ORGANISER, as_format_3, small_manifest, write_text
from test_shared_text import Tokens
from torch import nn

from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.app.text.token_shards import TokenText
from p2p_diloco.app.training import built_in, memory_needs
from p2p_diloco.app.training.built_in import BuiltInTraining
from p2p_diloco.config.invite import Invite, parse_invite
from p2p_diloco.config.manifest import SignedManifest
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.config.run_plan import plan_run
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError, DaemonEnded, FrameError, NetworkError, StateError
from p2p_diloco.ids import Digest, PeerId, format_peer_id, sha256
from p2p_diloco.protocol.rules import explain_unlisted
from p2p_diloco.protocol.wire.messages import ManifestReply, ManifestRequest, decode_message, encode_message
from p2p_diloco.session import network, start
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.session.own_model import OwnModel, describe_model
from p2p_diloco.session.peer_plan import Clocks, Founding, PeerPlan
from p2p_diloco.session.start import (
    MANIFEST_FILE,
    MOST_RESTARTS,
    PeerResult,
    as_end_of_daemon,
    nothing_left_if_refused,
    run_peer,
)
from p2p_diloco.session.training import Training
from p2p_diloco.status.event_log import PeerEvent, append_event
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.storage.run_folder import ADDRESSES_FILE, BALLOTS_FILE, ROSTERS_FILE, TOKENIZER_FILE, RunFolder
from p2p_diloco.storage.text_copy import list_own_text, text_folder
from p2p_diloco.testing.network import MemoryDirectory, MemoryTransport
from p2p_diloco.transport.link import Lane, TransportListener
from simulator.faulty_network import FaultyNetwork

SIGNED: SignedManifest = small_manifest().sign(ORGANISER)
RUN = SIGNED.manifest.digest()
KNOWN = format_peer_id(PeerId(sha256(b"somebody else")))
INVITE = Invite(run=RUN, bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWPJk7aoGTfgaHmihGLtRZSN8HptS3qJbVfQycYWkiWP4r",))


class PeerStage:
    """A memory network in place of libp2p."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop) -> None:
        self.network = FaultyNetwork(seed=1, delay_seconds=(0.01, 0.05))
        self.asked: list[dict[str, Any]] = []
        self.initial: list[tuple[str, ...]] = []
        self._folder = folder
        self.text = write_text(folder)
        self._directory = MemoryDirectory(loop.time)
        monkeypatch.setattr(network, "Libp2pTransport", self._transport)
        monkeypatch.setattr(network, "Libp2pDirectory", self._open_directory)
        self.clocks = Clocks(steady=loop.time, wall=loop.time)

    def _transport(self, *, peer: PeerId, run: Any, **choices: Any) -> Any:
        self.asked.append(choices)
        return self.network.transport(
            peer, run=run, can_be_dialled=not choices["dial_out_only"], limits=choices["limits"]
        )

    @asynccontextmanager
    async def _open_directory(self, _: Any, *, initial_peers: tuple[str, ...]) -> AsyncIterator[MemoryDirectory]:
        self.initial.append(initial_peers)
        yield self._directory

    def settings(self, name: str, **choices: Any) -> PeerSettings:
        own = {"data": str(self.text)} | choices
        return PeerSettings(state_directory=self._folder / name, device="cpu", **own)

    def founder(
        self,
        *,
        signed: SignedManifest = SIGNED,
        start: Path | None = None,
        names_founder: bool = False,
        **choices: Any,
    ) -> PeerPlan:
        source = Founding(
            signed=signed, organiser_key=ORGANISER, make_start=make_start, start=start, names_founder=names_founder
        )
        return PeerPlan(settings=self.settings("boot"), source=source, clocks=self.clocks, **choices)

    def joiner(self, name: str, invite: Invite, until_round: int | None = 3) -> PeerPlan:
        training = BuiltInTraining(evaluate_seconds=0.0)
        return PeerPlan(
            settings=self.settings(name),
            source=invite,
            training=training,
            until_round=until_round,
            clocks=self.clocks,
        )

    async def invite(self, watcher: Watcher) -> Invite:
        while not watcher.invites:
            await asyncio.sleep(0.1)
        return parse_invite(watcher.invites[0])


@pytest.fixture(autouse=True)
def addresses_of_the_memory_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the memory transport addresses in libp2p's form, so that invites can hold them."""

    def listen_addresses(self: MemoryTransport) -> tuple[str, ...]:
        return (f"/ip4/127.0.0.1/tcp/1/p2p/{format_peer_id(self.peer)}",) if self.can_be_dialled() else ()

    monkeypatch.setattr(MemoryTransport, "listen_addresses", listen_addresses)


@pytest.fixture
def stage(runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerStage:
    return PeerStage(tmp_path, monkeypatch, runner.get_loop())


async def test_a_joiner_needs_only_an_invite(stage: PeerStage, tmp_path: Path) -> None:
    boot, ada, stop = Watcher(), Watcher(), StopRequest()
    founder = asyncio.ensure_future(run_peer(stage.founder(), boot, stop))
    invite = await stage.invite(boot)
    assert invite.run == RUN
    result = await run_peer(stage.joiner("ada", invite), ada, StopRequest())
    assert isinstance(result, PeerResult)
    assert result.state_digest == ada.last.state_digest != ""
    assert result.anchor_loss is None
    assert ada.texts("manifest") == ['manifest of "small" verified against the invite']
    assert RunFolder(tmp_path / "ada", RUN).read(MANIFEST_FILE) == SIGNED.encode()
    assert ada.invites == [], "only a founder announces the invite"
    folder = RunFolder(tmp_path / "ada", RUN).path
    assert ada.texts("checkpoints") == [
        f"checkpoints go to {folder}; `p2p-diloco sample` and `p2p-diloco export` read the newest"
    ]
    topics = [event.topic for event in ada.events]
    begin = topics.index("checkpoints")
    assert topics[begin : begin + 3] == ["checkpoints", "starting", "device"], "slow steps are announced first"
    founded = tmp_path / "boot"
    assert RunFolder(founded, RUN).read(MANIFEST_FILE) == SIGNED.encode(), "its checkpoints need it as well"
    assert boot.texts("checkpoints") == [], "a bootstrap peer drops the state once others hold it"
    stop.stop_now()
    await founder


class Remover(Watcher):
    """An observer that removes a file once there is an invite."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def listening(self, invite: str, *, own_model: bool) -> None:
        self._path.unlink(missing_ok=True)
        super().listening(invite, own_model=own_model)


async def test_a_run_founded_from_a_file_continues_without_it(stage: PeerStage, tmp_path: Path) -> None:
    model = nn.Linear(40, 30)
    path = tmp_path / "model.safetensors"
    save_model(model, str(path))
    values = {"model": describe_model(model), "rounds": {"fragments": 2}}
    manifest = draft_manifest(organiser=ORGANISER.peer, now_seconds=CLOCK_START, name="own", values=values)
    signed = manifest.sign(ORGANISER)
    plan = stage.founder(signed=signed, names_founder=True)
    with pytest.raises(ConfigError, match="trains its own model; found it from the training loop of the model"):
        await run_peer(plan, Watcher(), StopRequest())
    invites = []
    for beginning in (path, None):
        watcher, stop = Remover(path), StopRequest()  # the file is read once, before the first invite
        plan = stage.founder(signed=signed, start=beginning, names_founder=True)
        founder = asyncio.ensure_future(run_peer(plan, watcher, stop))
        invites.append(await stage.invite(watcher))
        await asyncio.sleep(30.0)
        assert not founder.done()
        stop.stop_now()
        await founder
        assert [bool(watcher.texts("founded"))] == [beginning is not None]
        assert watcher.own_models == [True]
        assert watcher.statuses[-1].own_model
    assert invites[0].run == invites[1].run


async def test_an_unlisted_joiner_ends_with_its_id_and_what_to_do(stage: PeerStage) -> None:
    listed = {"trust.mode": "listed", "trust.peers": [KNOWN]}
    signed = small_manifest(listed).sign(ORGANISER)
    boot, ada, stop = Watcher(), Watcher(), StopRequest()
    founder = asyncio.ensure_future(run_peer(stage.founder(signed=signed), boot, stop))
    invite = await stage.invite(boot)
    plan = stage.joiner("ada", invite)
    for _ in range(2):  # the second time its manifest is on disk
        with pytest.raises(ConfigError) as refused:
            await run_peer(plan, ada, StopRequest())
        own = load_or_create_identity(plan.settings.identity_file).peer
        assert str(refused.value) == explain_unlisted(own)
    assert boot.texts("trust") == [], "a bootstrap peer that founds a run need not be listed"
    introducer, end = Watcher(), StopRequest()
    plan = replace(stage.joiner("second", invite, None), training=None)
    second = asyncio.ensure_future(run_peer(plan, introducer, end))
    await asyncio.sleep(5.0)
    (text,) = introducer.texts("trust")
    assert text.endswith("until then this peer only serves the manifest")
    for each in (stop, end):
        each.stop_now()
    await asyncio.gather(founder, second)


async def test_a_trainer_that_founds_a_run_must_be_on_its_list(stage: PeerStage) -> None:
    listed = {"trust.mode": "listed", "trust.peers": [KNOWN]}
    plan = stage.founder(signed=small_manifest(listed).sign(ORGANISER), training=BuiltInTraining())
    with pytest.raises(ConfigError, match=r"\(this peer\) is not on the list of its own run; add it to \[trust\]"):
        await run_peer(plan, Watcher(), StopRequest())


async def test_a_returning_joiner_needs_nobody_for_the_manifest(stage: PeerStage, tmp_path: Path) -> None:
    RunFolder(tmp_path / "ada", RUN).write(MANIFEST_FILE, SIGNED.encode())
    stop, watcher = StopRequest(), Watcher()
    task = asyncio.ensure_future(run_peer(stage.joiner("ada", Invite(run=RUN, bootstraps=())), watcher, stop))
    await asyncio.sleep(10.0)
    stop.stop_now()
    await task
    assert watcher.statuses
    assert watcher.texts("manifest") == []


@pytest.mark.long
async def test_a_peer_that_lost_its_folder_but_not_its_identity_has_a_later_incarnation_and_becomes_ready(
    stage: PeerStage, tmp_path: Path
) -> None:
    boot, first, again, stop = Watcher(), Watcher(), Watcher(), StopRequest()
    founder = asyncio.ensure_future(run_peer(stage.founder(), boot, stop))
    invite = await stage.invite(boot)
    ben = asyncio.ensure_future(run_peer(stage.joiner("ben", invite, until_round=30), Watcher(), StopRequest()))
    await run_peer(stage.joiner("ada", invite, until_round=6), first, StopRequest())
    assert first.last.incarnation == 1
    shutil.rmtree(RunFolder(tmp_path / "ada", RUN).path)
    await run_peer(stage.joiner("ada", invite, until_round=30), again, StopRequest())
    assert again.last.incarnation > 1_000_000
    assert any(status.ready for status in again.statuses)
    await ben
    stop.stop_now()
    await founder


@pytest.mark.parametrize("content", [b"", b"torn", SIGNED.encode()[:-1], SIGNED.encode() + b" "])
async def test_a_broken_manifest_on_disk_is_reported(stage: PeerStage, tmp_path: Path, content: bytes) -> None:
    RunFolder(tmp_path / "ada", RUN).write(MANIFEST_FILE, content)
    with pytest.raises(StateError, match=r"manifest\.json is broken .*; move it away to fetch it again"):
        await run_peer(stage.joiner("ada", Invite(run=RUN, bootstraps=())), Watcher(), StopRequest())


async def test_a_state_folder_of_the_version_before_is_refused_with_what_to_do_and_left_as_it_is(
    stage: PeerStage, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "ada", RUN)
    kept = {MANIFEST_FILE: as_format_3(SIGNED.encode()), ROSTERS_FILE: b"rosters", BALLOTS_FILE: b"ballots"}
    for name, content in kept.items():
        folder.write(name, content)
    with pytest.raises(StateError) as caught:
        await run_peer(stage.joiner("ada", Invite(run=RUN, bootstraps=())), Watcher(), StopRequest())
    assert str(caught.value) == (
        f"{folder.path / MANIFEST_FILE} is of format 3, and this version of p2p-diloco reads format 5; use the "
        "version that made the run, or make a new run with `p2p-diloco new`"
    )
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == kept


async def test_a_manifest_of_another_run_on_disk_is_refused(stage: PeerStage, tmp_path: Path) -> None:
    other = small_manifest({"model.seed": 9}).sign(ORGANISER)
    RunFolder(tmp_path / "ada", RUN).write(MANIFEST_FILE, other.encode())
    with pytest.raises(ConfigError, match="ask for a new invite"):
        await run_peer(stage.joiner("ada", Invite(run=RUN, bootstraps=())), Watcher(), StopRequest())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"rubbish", "a manifest of 7 bytes"),
        (SIGNED.encode()[:-1], "a manifest that this version cannot read"),
        (bytes(64) + SIGNED.encode()[64:], "is not signed by its organiser"),
    ],
)
async def test_a_wrong_manifest_from_the_swarm_is_refused_so_that_another_peer_is_asked(
    stage: PeerStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, expected: str
) -> None:
    async def fetch(*_: Any, check: Callable[[bytes], object]) -> None:
        check(content)
        raise AssertionError("it was taken")

    monkeypatch.setattr(start, "fetch_manifest", fetch)
    with pytest.raises((ConfigError, FrameError), match=expected):
        await run_peer(stage.joiner("ada", INVITE), Watcher(), StopRequest())
    assert RunFolder(tmp_path / "ada", RUN).read(MANIFEST_FILE) is None


async def test_bootstrap_peers_that_do_not_answer_are_reported(stage: PeerStage) -> None:
    with pytest.raises(NetworkError, match="the one peer asked did not answer within 20 s"):
        await run_peer(stage.joiner("ada", INVITE), Watcher(), StopRequest())


async def test_a_peer_asked_to_leave_before_any_answer_leaves_at_once(stage: PeerStage) -> None:
    watcher, stop = Watcher(), StopRequest()
    loop = asyncio.get_running_loop()
    asked_at = loop.time()
    loop.call_later(1.0, stop.leave)
    result = await run_peer(stage.joiner("ada", INVITE), watcher, stop)
    assert (result.state_digest, loop.time() - asked_at) == ("", pytest.approx(1.0))
    assert watcher.texts("asking")[-1] == "stopped before any peer answered"


async def test_an_invite_without_bootstraps_needs_initial_peers(stage: PeerStage) -> None:
    with pytest.raises(ConfigError, match="add one with --initial-peers"):
        await run_peer(stage.joiner("ada", Invite(run=RUN, bootstraps=())), Watcher(), StopRequest())


async def _until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    until = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.1)


class Lives:
    """Peers that run at the same time; a killed one gets no warning."""

    def __init__(self, stage: PeerStage) -> None:
        self._stage = stage
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self.watchers: dict[str, Watcher] = {}

    def start(self, name: str, plan: PeerPlan) -> Watcher:
        self.watchers[name] = Watcher()
        self._tasks[name] = asyncio.ensure_future(run_peer(plan, self.watchers[name], StopRequest()))
        return self.watchers[name]

    async def kill(self, *names: str) -> None:
        for name in names or tuple(self._tasks):
            task = self._tasks.pop(name)
            task.cancel()
            await asyncio.wait({task})

    async def end(self, name: str) -> None:
        await self._tasks.pop(name)

    async def ready(self, *names: str) -> None:
        for name in names:
            await _until(lambda name=name: self.watchers[name].statuses and self.watchers[name].last.ready)

    async def members(self, *names: str) -> None:
        """Wait until these are on the roster: before its first vote, a run ends with its founder."""
        for name in names:
            await _until(lambda name=name: self.watchers[name].last.num_members == len(names))


DEAD = Invite(run=RUN, bootstraps=(f"/ip4/127.0.0.1/tcp/1/p2p/{format_peer_id(PeerId(sha256(b'dead')))}",))


async def test_a_newcomer_joins_with_a_members_invite_when_the_bootstrap_peer_is_dead(stage: PeerStage) -> None:
    lives = Lives(stage)
    boot = lives.start("boot", stage.founder())
    invite = await stage.invite(boot)
    for name in ("ada", "ben"):
        lives.start(name, stage.joiner(name, invite, until_round=None))
    await lives.ready("ada", "ben")
    await lives.members("ada", "ben")
    await lives.kill("boot")
    await asyncio.sleep(30.0)
    printed = parse_invite(lives.watchers["ben"].last.invite)
    assert printed.roster is not None
    assert printed.bootstraps[0] == lives.watchers["ben"].last.addresses[0]
    lives.start("cleo", stage.joiner("cleo", printed, until_round=None))
    await lives.ready("cleo")
    assert any(text.endswith("answered (named in the invite)") for text in lives.watchers["cleo"].texts("asking"))
    assert any("others join with: p2p-diloco join" in text for text in lives.watchers["ben"].texts("invite"))
    await lives.kill()


async def test_a_peer_whose_libp2p_daemon_ends_starts_it_again_three_times_and_takes_part_each_time(
    stage: PeerStage, tmp_path: Path
) -> None:
    lives = Lives(stage)
    invite = await stage.invite(lives.start("boot", stage.founder()))
    for name in ("ada", "ben"):
        lives.start(name, stage.joiner(name, invite, until_round=None))
    await lives.ready("ada", "ben")
    await lives.members("ada", "ben")
    ben, ended = lives.watchers["ben"], DaemonEnded("the libp2p daemon of this peer ended (killed)")
    for times in range(1, MOST_RESTARTS + 1):
        await takes_part(ben, times)
        end_transport(stage, tmp_path / "ben", ended)
    await takes_part(ben, MOST_RESTARTS + 1)
    assert ben.texts("daemon") == [f"{ended}; it is started again"] * MOST_RESTARTS
    end_transport(stage, tmp_path / "ben", ended)
    with pytest.raises(DaemonEnded):
        await lives.end("ben")
    await lives.kill()


async def test_a_founder_whose_daemon_ends_at_once_goes_on_with_the_start_that_it_founded(
    stage: PeerStage, tmp_path: Path
) -> None:
    lives = Lives(stage)
    boot = lives.start("boot", stage.founder())
    await _until(lambda: boot.texts("founded"))
    end_transport(stage, tmp_path / "boot", DaemonEnded("the libp2p daemon of this peer ended (killed)"))
    await _until(lambda: boot.texts("daemon"))
    lives.start("ada", stage.joiner("ada", await stage.invite(boot), until_round=None))
    await lives.ready("ada")
    assert len(boot.texts("founded")) == 1
    assert not [event for watcher in (boot, lives.watchers["ada"]) for event in watcher.texts("content")]
    await lives.kill()


@pytest.mark.parametrize(
    ("lost", "raised"), [(DaemonEnded("it ended"), DaemonEnded), (NetworkError("another"), OSError), (None, OSError)]
)
def test_what_fails_because_the_daemon_ended_is_reported_as_its_end(
    lost: NetworkError | None, raised: type[Exception]
) -> None:
    async def scene() -> None:
        async with as_end_of_daemon(cast(Any, SimpleNamespace(lost=lost))):
            raise ConnectionRefusedError("no socket")

    with pytest.raises(raised):
        asyncio.run(scene())


async def takes_part(watcher: Watcher, life: int) -> None:
    """Wait until a peer has been ready in so many lives."""

    def incarnations() -> set[int]:
        return {status.incarnation for status in watcher.statuses if status.ready and status.phase == "training"}

    await _until(lambda: len(incarnations()) == life)


def end_transport(stage: PeerStage, folder: Path, error: NetworkError) -> None:
    transport = stage.network.find(load_or_create_identity(folder / "identity.key").peer)
    assert transport is not None
    transport.lost = error
    transport.listener.transport_lost(error)


async def test_a_former_member_returns_although_no_peer_of_its_invite_is_alive(
    stage: PeerStage, tmp_path: Path
) -> None:
    lives = Lives(stage)
    invite = await stage.invite(lives.start("boot", stage.founder()))
    for name in ("ada", "ben"):
        lives.start(name, stage.joiner(name, invite, until_round=None))
    await lives.ready("ada", "ben")
    await lives.members("ada", "ben")
    await lives.kill("boot", "ben")
    lives.start("ben", stage.joiner("ben", DEAD, until_round=None))
    await lives.ready("ben")
    (answered,) = [text for text in lives.watchers["ben"].texts("link") if "answered" in text]
    assert "whose addresses were known" in answered
    await lives.kill("ben")
    RunFolder(tmp_path / "ben", RUN).path.joinpath(MANIFEST_FILE).unlink()
    lives.start("ben", stage.joiner("ben", DEAD, until_round=None))
    await lives.ready("ben")
    asked = lives.watchers["ben"].texts("asking")
    assert asked[-1].endswith("answered (known from before, not named in the invite)")
    await lives.kill()


async def test_a_returning_peer_without_an_answer_reports_each_attempt_and_keeps_trying(
    stage: PeerStage, tmp_path: Path
) -> None:
    RunFolder(tmp_path / "ada", RUN).write(MANIFEST_FILE, SIGNED.encode())
    lives = Lives(stage)
    ada = lives.start("ada", stage.joiner("ada", DEAD, until_round=None))
    await asyncio.sleep(100.0)
    lonely = [text for text in ada.texts("link") if text.startswith("no answer within 60 s from 1 known peer (")]
    assert len(lonely) == 1
    assert "refused" in lonely[0]
    assert "still trying" in lonely[0]
    await lives.kill()


async def test_two_bootstrap_peers_with_one_run_file_found_two_runs(stage: PeerStage) -> None:
    lives, plan = Lives(stage), stage.founder(names_founder=True)
    first = await stage.invite(lives.start("boot", plan))
    second = await stage.invite(lives.start("again", replace(plan, settings=stage.settings("again"))))
    assert first.run != second.run
    await lives.kill("boot")
    assert (await stage.invite(lives.start("boot", plan))).run == first.run, "the founder itself returns to its run"
    lives.start("ada", stage.joiner("ada", replace(first, bootstraps=second.bootstraps)))
    with pytest.raises(ConfigError, match="is not in run"):
        await lives.end("ada")
    await lives.kill()


async def test_a_run_file_that_names_another_founder_is_refused(stage: PeerStage) -> None:
    other = SIGNED.manifest.model_copy(update={"founder": format_peer_id(PeerId(sha256(b"other")))})
    with pytest.raises(ConfigError, match="start it with the run's invite"):
        await run_peer(stage.founder(signed=other.sign(ORGANISER)), Watcher(), StopRequest())


async def test_a_second_bootstrap_peer_introduces_and_founds_nothing(stage: PeerStage) -> None:
    lives = Lives(stage)
    invite = await stage.invite(lives.start("boot", stage.founder()))
    lives.start("ada", stage.joiner("ada", invite, until_round=None))
    await lives.ready("ada")
    plan = replace(stage.joiner("second", invite, until_round=None), training=None)
    second = lives.start("second", plan)
    printed = await stage.invite(second)
    assert printed.bootstraps[0] == second.last.addresses[0]
    assert invite.bootstraps[0] in printed.bootstraps
    await asyncio.sleep(20.0)
    named = [
        watcher.last.addresses[0] in parse_invite(lives.watchers["ada"].last.invite).bootstraps
        for watcher in (lives.watchers["boot"], second)
    ]
    assert named == [True, True], "and a member names both"
    assert second.texts("founded") == []
    assert second.last.phase == "serving"
    assert second.last.num_members == lives.watchers["ada"].last.num_members == 1, "the founder does not train"
    await lives.kill("boot")
    lives.start("ben", stage.joiner("ben", replace(invite, bootstraps=printed.bootstraps[:1]), until_round=None))
    await lives.ready("ben")
    await lives.kill()


async def test_a_broken_address_in_the_invite_is_reported_and_the_others_are_asked(stage: PeerStage) -> None:
    lives = Lives(stage)
    invite = await stage.invite(lives.start("boot", stage.founder()))
    ada = lives.start("ada", stage.joiner("ada", replace(invite, complaints=("a part is left out",)), until_round=None))
    await lives.ready("ada")
    assert ada.texts("invite")[0] == "a part is left out"
    await lives.kill()


async def test_unreadable_saved_addresses_are_reported(stage: PeerStage, tmp_path: Path) -> None:
    lives = Lives(stage)
    invite = await stage.invite(lives.start("boot", stage.founder()))
    RunFolder(tmp_path / "ada", RUN).write(ADDRESSES_FILE, b'{"12D3": ["/ip')
    ada = lives.start("ada", stage.joiner("ada", invite, until_round=None))
    await lives.ready("ada")
    assert ada.texts("addresses")[0].endswith("peers.json cannot be read; using only the given addresses")
    await lives.kill()


async def test_an_impossible_run_is_refused_before_anybody_is_invited(stage: PeerStage) -> None:
    watcher = Watcher()
    signed = small_manifest({"rounds.fragments": 1000}).sign(ORGANISER)
    with pytest.raises(ConfigError, match="1000 fragments"):
        await run_peer(stage.founder(signed=signed), watcher, StopRequest())
    assert not watcher.invites


@pytest.mark.parametrize("founds", [True, False])
@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"device": "cuda:99"}, "device 'cuda:99' is not available"),
        ({"data": "/missing"}, "text /missing does not exist"),
    ],
)
async def test_a_trainer_without_its_device_or_text_is_refused_before_anybody_is_asked_or_invited(
    stage: PeerStage, tmp_path: Path, founds: bool, choice: dict[str, str], text: str
) -> None:
    watcher = Watcher()
    plan = replace(stage.founder(), training=BuiltInTraining()) if founds else stage.joiner("ada", INVITE)
    with pytest.raises(ConfigError, match=text):
        await run_peer(replace(plan, settings=plan.settings.model_copy(update=choice)), watcher, StopRequest())
    assert not stage.asked
    assert (watcher.invites, watcher.events) == ([], [])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


class Writer(Watcher):
    """An observer that writes events into the state directory, as all peers do."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def event(self, event: PeerEvent) -> None:
        super().event(event)
        append_event(self._folder, event)


@pytest.mark.parametrize("makes", [BuiltInTraining, lambda: OwnModel(nn.Linear(3, 3), [])], ids=["command", "loop"])
async def test_a_joiner_whose_run_trains_another_model_is_refused_and_leaves_no_files(
    stage: PeerStage, tmp_path: Path, makes: Callable[[], Training]
) -> None:
    model, path = nn.Linear(40, 30), tmp_path / "model.safetensors"
    save_model(model, str(path))
    values = {"model": describe_model(model), "rounds": {"fragments": 2}}
    manifest = draft_manifest(organiser=ORGANISER.peer, now_seconds=CLOCK_START, name="own", values=values)
    boot, stop = Watcher(), StopRequest()
    plan = stage.founder(signed=manifest.sign(ORGANISER), start=path)
    founder = asyncio.ensure_future(run_peer(plan, boot, stop))
    invite = await stage.invite(boot)

    async def refused(name: str) -> None:
        plan = replace(stage.joiner(name, invite), training=makes())
        watcher = Writer(plan.settings.state_directory)
        expected = r"trains its own model|build the same model as the organiser"
        with pytest.raises(ConfigError, match=expected), nothing_left_if_refused(plan):
            await run_peer(plan, watcher, StopRequest())
        assert watcher.texts("manifest"), "it wrote events, a key and the manifest"
        assert watcher.texts("checkpoints") == []

    await refused("new/ada")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    key = load_or_create_identity(tmp_path / "old" / "identity.key")
    await refused("old")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["identity.key"]
    assert load_or_create_identity(tmp_path / "old" / "identity.key").peer == key.peer
    stop.stop_now()
    await founder


async def test_the_state_directory_is_private_to_its_owner(stage: PeerStage, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the invite names no bootstrap peer"):
        await run_peer(stage.joiner("ada", replace(INVITE, bootstraps=())), Watcher(), StopRequest())
    assert (tmp_path / "ada").stat().st_mode & 0o077 == 0


async def test_an_unreachable_founder_is_refused(stage: PeerStage) -> None:
    hidden = stage.settings("boot", dial_out_only=True)
    with pytest.raises(ConfigError, match="remove --dial-out-only"):
        await run_peer(replace(stage.founder(), settings=hidden), Watcher(), StopRequest())


async def test_a_state_directory_that_cannot_be_created_is_reported(stage: PeerStage, tmp_path: Path) -> None:
    (tmp_path / "boot").write_text("in the way")
    with pytest.raises(StateError, match="choose another place with --state-directory"):
        await run_peer(stage.founder(), Watcher(), StopRequest())


async def test_an_identity_is_used_by_one_peer_at_a_time(stage: PeerStage) -> None:
    stop, watcher = StopRequest(), Watcher()
    first = asyncio.ensure_future(run_peer(stage.founder(), watcher, stop))
    await stage.invite(watcher)
    with pytest.raises(ConfigError):
        await run_peer(stage.founder(), Watcher(), StopRequest())
    stop.stop_now()
    await first


async def test_addresses_from_earlier_starts_settings_and_the_invite_are_all_asked(
    stage: PeerStage, tmp_path: Path
) -> None:
    def address(name: bytes, port: int) -> str:
        return f"/ip4/127.0.0.1/tcp/{port}/p2p/{format_peer_id(PeerId(sha256(name)))}"

    folder = RunFolder(tmp_path / "ada", RUN)
    folder.write(MANIFEST_FILE, SIGNED.encode())
    folder.keep_addresses({PeerId(sha256(b"a")): (address(b"a", 1),), PeerId(sha256(b"b")): (address(b"b", 1),)})
    plan = PeerPlan(
        settings=stage.settings("ada", initial_peers=(address(b"c", 3),)),
        source=Invite(run=RUN, bootstraps=(address(b"a", 2),)),
        training=BuiltInTraining(),
        clocks=stage.clocks,
    )
    stop = StopRequest()
    stop.stop_now()
    await run_peer(plan, Watcher(), stop)
    assert set(stage.initial[0]) == {address(b"a", 2), address(b"a", 1), address(b"b", 1), address(b"c", 3)}
    assert stage.initial[0].index(address(b"a", 2)) < stage.initial[0].index(address(b"a", 1)), (
        "the invite's comes first"
    )


def test_the_clock_of_these_tests_starts_before_round_0() -> None:
    assert SIGNED.manifest.rounds.clock_start == CLOCK_START


async def test_caps_apply_to_the_transport_and_the_rounds_and_are_reported(stage: PeerStage) -> None:
    boot, ada, stop = Watcher(), Watcher(), StopRequest()
    founder = asyncio.ensure_future(run_peer(stage.founder(), boot, stop))
    joiner = stage.joiner("ada", await stage.invite(boot))
    capped = joiner.settings.model_copy(update={"max_upload": 160e3, "max_download": 320e3})
    await run_peer(replace(joiner, settings=capped), ada, StopRequest())
    limits = stage.asked[-1]["limits"]
    assert (limits.upload_bytes_per_second, limits.download_bytes_per_second) == (20e3, 40e3)
    assert (ada.last.max_upload, ada.last.max_download) == (160e3, 320e3)
    before, after = ada.texts("traffic")  # it averages too once it is proved reachable
    assert before.startswith("with 1 trainer about 5.8 kB each way every")
    assert after.startswith("with 1 trainer about 5.8 kB up and 2.9 kB down every")
    (told,) = boot.texts("traffic")
    assert told.startswith("at full rate this run sends up to 58.6 MB and receives up to 58.6 MB a day")
    stop.stop_now()
    await founder


class Liar(TransportListener):
    """A listener that answers manifest requests with a manifest that no honest program signs."""

    def __init__(self, transport: MemoryTransport, manifest: bytes) -> None:
        self._transport, self._manifest = transport, manifest
        transport.serve(self)

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        if isinstance(decode_message(frame), ManifestRequest):
            reply, deadline = ManifestReply(manifest=self._manifest), asyncio.get_running_loop().time() + 5.0
            self._transport.post(peer, encode_message(reply), lane=Lane.CONTROL, deadline=deadline)


async def test_a_joiner_refuses_a_model_too_large_for_any_machine_and_allocates_nothing(stage: PeerStage) -> None:
    model = SIGNED.manifest.model.model_copy(update={"layers": 4096, "width": 8192, "feed_forward": 16384})
    huge = SIGNED.manifest.model_copy(update={"model": model}).sign(ORGANISER)
    run, liar = huge.manifest.digest(), PeerId(sha256(b"liar"))
    async with stage.network.transport(liar, run=run) as transport:
        Liar(transport, huge.encode())
        invite = Invite(run=run, bootstraps=transport.listen_addresses())
        tracemalloc.start()
        try:
            with pytest.raises(ConfigError, match=r"the model has 2,748,850,380,800 parameters; expected at most 1"):
                await run_peer(stage.joiner("ada", invite), Watcher(), StopRequest())
            assert tracemalloc.get_traced_memory()[1] < 10_000_000
        finally:
            tracemalloc.stop()


async def test_a_founder_refuses_a_model_too_large_for_this_machine(
    stage: PeerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "total_memory", lambda: 1000)
    text = r"the model has [\d,]+ parameters and needs at least 0.0 GB of memory to be held; this machine has"
    with pytest.raises(ConfigError, match=text):
        await run_peer(stage.founder(), Watcher(), StopRequest())


async def test_a_joiner_without_enough_free_memory_is_refused_before_it_builds_or_fetches_anything(
    stage: PeerStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot, stop = Watcher(), StopRequest()
    founder = asyncio.ensure_future(run_peer(stage.founder(), boot, stop))
    invite = await stage.invite(boot)
    monkeypatch.setattr(memory_needs, "free_memory", lambda: 1000)
    monkeypatch.setattr(built_in, "build_run_model", None)
    monkeypatch.setattr(start, "PeerSession", None)
    plan = stage.joiner("new/ada", invite)
    watcher = Writer(plan.settings.state_directory)
    text = (
        r"needs at least .* memory on this machine .* and 1.0 kB of .* are free; close the programs that use the rest"
    )
    with pytest.raises(ConfigError, match=text), nothing_left_if_refused(plan):
        await run_peer(plan, watcher, StopRequest())
    assert watcher.texts("manifest")
    assert not (tmp_path / "new").exists()
    stop.stop_now()
    await founder


async def test_a_joiner_whose_memory_may_run_out_trains_and_says_so(
    stage: PeerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot, ada, stop = Watcher(), Watcher(), StopRequest()
    founder = asyncio.ensure_future(run_peer(stage.founder(), boot, stop))
    plan = plan_run(SIGNED.manifest)
    need, _ = memory_needs.needed_bytes(memory_needs.load_of(plan), memory_needs.room_here(torch.device("cpu")))
    monkeypatch.setattr(memory_needs, "free_memory", lambda: need)
    await run_peer(stage.joiner("ada", await stage.invite(boot)), ada, StopRequest())
    (text,) = ada.texts("memory")
    assert text.startswith("memory may run out: training is likely to need 200.")
    assert ada.last.inner_steps > 0
    stop.stop_now()
    await founder


def shared(folder: Path, **values: Any) -> SignedManifest:
    """Return a run that shares the text of the stage."""
    return shared_by(write_text(folder), **values)


def shared_by(path: Path, **values: Any) -> SignedManifest:
    own = list_own_text(str(path))
    data = {"data.path": "/elsewhere/words.txt", "data.share": True, "data.files": own.digest.hex()}
    return small_manifest(data | values).sign(ORGANISER)


async def test_a_joiner_without_a_copy_fetches_the_text_and_trains(stage: PeerStage, tmp_path: Path) -> None:
    signed = shared(tmp_path)
    boot, ada, ben, stop = Watcher(), Watcher(), Watcher(), StopRequest()
    founder = asyncio.ensure_future(run_peer(stage.founder(signed=signed), boot, stop))
    invite = await stage.invite(boot)
    joiners = []
    for name, watcher in (("ada", ada), ("ben", ben)):
        plan = stage.joiner(name, invite, until_round=8)
        bare = replace(
            plan,
            settings=stage.settings(name, data=None),
            training=BuiltInTraining(evaluate_seconds=5.0),
        )
        joiners.append(run_peer(bare, watcher, StopRequest()))
    one, other = await asyncio.gather(*joiners)
    assert one.state_digest == other.state_digest != ""
    assert one.anchor_loss is not None, "measured on the held-out part of the fetched text"
    for name, watcher in (("ada", ada), ("ben", ben)):
        texts = watcher.texts("text")
        assert texts[0].startswith("fetching 39.4 kB of the run's text (1 file, 39.4 kB) from other peers"), texts
        assert texts[-1].startswith("all of the run's text is here, 39.4 kB in")
        assert watcher.last.inner_steps > 0
        store = text_folder(tmp_path / name, Digest(bytes.fromhex(signed.manifest.data.files or "")))
        assert (store / "text" / "words.txt").read_bytes() == (tmp_path / "words.txt").read_bytes()
    assert boot.last.bytes_sent.transfer > 2 * 39_000
    stop.leave()
    await founder


async def test_a_joiner_without_a_copy_fetches_the_shards_of_its_windows_and_trains(
    stage: PeerStage, tmp_path: Path
) -> None:
    tokens = Tokens(tmp_path)
    text = TokenText(tokens.root)
    named = {"data.fingerprint": text.fingerprint.hex(), "data.tokenizer": text.index.tokenizer}
    shape = {"model.vocabulary": text.index.vocabulary, "rounds.spans_per_fragment": 2}
    signed = shared_by(tokens.root, **named, **shape)
    boot, ada, stop = Watcher(), Watcher(), StopRequest()
    plan = stage.founder(signed=signed, training=BuiltInTraining(evaluate_seconds=0.0))
    plan = replace(plan, settings=stage.settings("boot", data=str(tokens.root)))
    founder = asyncio.ensure_future(run_peer(plan, boot, stop))
    invite = await stage.invite(boot)
    joiner = replace(
        stage.joiner("ada", invite, until_round=8),
        settings=stage.settings("ada", data=None),
        training=BuiltInTraining(evaluate_seconds=5.0),
    )
    result = await run_peer(joiner, ada, StopRequest())
    assert result.anchor_loss is not None
    assert ada.last.inner_steps > 0
    run = signed.manifest.digest()
    assert RunFolder(tmp_path / "ada", run).read(TOKENIZER_FILE) == b"{}", "for export"
    stop.leave()
    await founder


async def test_a_joiner_does_not_step_before_its_text_is_here(stage: PeerStage, tmp_path: Path) -> None:
    signed = shared(tmp_path)
    boot, ada, stop = Watcher(), Watcher(), StopRequest()
    plan = replace(stage.founder(signed=signed), settings=stage.settings("boot", data=None))
    founder = asyncio.ensure_future(run_peer(plan, boot, stop))
    invite = await stage.invite(boot)
    assert boot.texts("text") == [
        "this peer has no copy of the run's text, so it sends it to nobody; name one with --data"
    ]
    leave = StopRequest()
    joiner = replace(stage.joiner("ada", invite, until_round=None), settings=stage.settings("ada", data=None))
    running = asyncio.ensure_future(run_peer(joiner, ada, leave))
    await asyncio.sleep(80.0)
    assert ada.texts("text") == ["no linked peer holds the list of the run's text; waiting for one"]
    assert ada.last.phase == "not stepping"
    assert ada.last.inner_steps == 0
    leave.leave()
    await running
    stop.leave()
    await founder


async def test_a_copy_of_another_text_is_refused_and_leaves_no_files(stage: PeerStage, tmp_path: Path) -> None:
    signed = shared(tmp_path)
    boot, stop = Watcher(), StopRequest()
    founder = asyncio.ensure_future(run_peer(stage.founder(signed=signed), boot, stop))
    invite = await stage.invite(boot)
    other = tmp_path / "other.txt"
    other.write_text("other words " * 5000)
    plan = replace(stage.joiner("ada", invite), settings=stage.settings("ada", data=str(other)))
    why = "is not the run's: its list of files has the digest"
    with pytest.raises(ConfigError, match=why), nothing_left_if_refused(plan):
        await run_peer(plan, Watcher(), StopRequest())
    assert not (tmp_path / "ada").exists()
    stop.leave()
    await founder


async def test_a_founder_that_trains_needs_its_copy(stage: PeerStage, tmp_path: Path) -> None:
    plan = stage.founder(signed=shared(tmp_path), training=BuiltInTraining(evaluate_seconds=0.0))
    plan = replace(plan, settings=stage.settings("boot", data=None))
    with pytest.raises(ConfigError, match="its founder must have a copy; name it with --data PATH"):
        await run_peer(plan, Watcher(), StopRequest())
