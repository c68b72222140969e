"""An archivist follows the run and exports one agreed state every few cycles; network and clock are simulated."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kept_entries import entry_after, follow, log_of
from safetensors.torch import load
from session_stage import SessionStage, Watcher
from small_run import CLOCK_START, ORGANISER, ROSTER, peer_key, small_manifest, small_plan, write_text
from torch import nn

from p2p_diloco.app.models import archivist
from p2p_diloco.app.models.archivist import Archivist, CompletedCycles
from p2p_diloco.app.models.exported_model import files_of, provenance_of
from p2p_diloco.app.text.token_shards import INDEX_FILE, Shard, ShardIndex, Source
from p2p_diloco.app.text.tokenizer_files import TokenizerFiles
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId, SpanId, sha256
from p2p_diloco.outer.state import SpanState, genesis_state
from p2p_diloco.protocol.wire.file_list import FILE_PIECE_BYTES
from p2p_diloco.protocol.wire.heartbeat import FragmentHead
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.session.learnt_model import load_learnt_model
from p2p_diloco.session.own_model import describe_model
from p2p_diloco.session.shared_text import SharedText
from p2p_diloco.session.training import TrainingHost
from p2p_diloco.storage.archive import Archive
from p2p_diloco.storage.export_folder import WORD_FILE, ExportFolder, ExportPlan
from p2p_diloco.storage.run_folder import MANIFEST_FILE, TOKENIZER_FILE
from p2p_diloco.storage.text_copy import TextStore, list_own_text
from simulator.virtual_time import run_virtual

Patch = pytest.MonkeyPatch
EVERY = 2
NOWHERE = ExportPlan(folder=Path("exports"), every=1, keep=1)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Swarm:
    """A founder, two trainers and archivists on one stage."""

    def __init__(self, stage: SessionStage, tasks: asyncio.TaskGroup, until_round: int) -> None:
        self.stage = stage
        self.watchers: dict[str, Watcher] = {}
        self._tasks = tasks
        self._until_round = until_round
        self.start("boot", founds=True, trains=False)
        self.start("ada", evaluate_seconds=4.0)
        self.start("ben")

    def start(self, name: str, **choices: Any) -> asyncio.Task[None]:
        watcher = self.watchers[name] = Watcher()
        play = self.stage.play(name, watcher, StopRequest(), until_round=self._until_round, **choices)
        return self._tasks.create_task(play, name=name)

    def archive(self, name: str, into: Path, *, keep: int = 2) -> asyncio.Task[None]:
        return self.start(name, trains=False, exports=ExportPlan(folder=into, every=EVERY, keep=keep))


@pytest.mark.slow
async def test_two_archivists_export_the_same_agreed_states_and_keep_the_newest(tmp_path: Path) -> None:
    stage = SessionStage(tmp_path)
    async with asyncio.TaskGroup() as tasks:
        swarm = Swarm(stage, tasks, until_round=15)
        swarm.archive("archie", tmp_path / "one")
        await stage.sleep_to(4, seconds=3.0)
        swarm.archive("bert", tmp_path / "two")
    watchers = swarm.watchers
    cycles = [event.figures["cycle"] for event in watchers["archie"].events if "cycle" in event.figures]
    assert cycles == [2, 4, 6, 8], watchers["archie"].texts("export")
    assert names_in(tmp_path / "one") == names_in(tmp_path / "two") == ["cycle-000000006", "cycle-000000008"]
    for name in names_in(tmp_path / "one"):
        word, *files = names_in(tmp_path / "one" / name)
        assert word == WORD_FILE
        configs, tokenizer = ["config.json", "generation_config.json"], ["tokenizer.json", "tokenizer_config.json"]
        assert files == ["README.md", *configs, "model.safetensors", "run.toml", *tokenizer]
        for file in files:
            assert (tmp_path / "one" / name / file).read_bytes() == (tmp_path / "two" / name / file).read_bytes()
    last = watchers["archie"].last
    assert (last.role, last.phase) == ("archivist", "finished")
    assert last.num_members == 2, "it is never a member"
    assert last.state_digest == watchers["ada"].last.state_digest != ""
    assert last.anchor_loss == watchers["bert"].last.anchor_loss == watchers["ada"].last.anchor_loss
    phases = dict.fromkeys(status.phase for status in watchers["archie"].statuses)
    assert list(phases) == ["catching up", "following", "finished"]
    # After the last round, a trainer's checkpoint holds the same state, and `export` writes the same files.
    stage.run_folder("ada").write(MANIFEST_FILE, stage.manifest.sign(ORGANISER).encode())
    learnt = load_learnt_model(stage.folder("ada"))
    own = files_of(learnt, provenance_of(learnt, watchers["ada"].last))
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "one" / "cycle-000000008" / file).read_bytes() == own[file]
    card = (tmp_path / "one" / "cycle-000000008" / "README.md").read_text()
    assert f"| state | `{last.state_digest}`" in card
    assert f"| held-out loss | {last.anchor_loss:.4f} nats per token, of these parameters |" in card
    assert "| rounds, cycles | 16, 8.0 |" in card


@pytest.mark.long
async def test_an_archivist_that_was_killed_continues_where_it_was(tmp_path: Path) -> None:
    stage, into = SessionStage(tmp_path), tmp_path / "exports"
    async with asyncio.TaskGroup() as tasks:
        swarm = Swarm(stage, tasks, until_round=17)
        killed = swarm.archive("archie", into, keep=9)
        await stage.sleep_to(7, seconds=3.0)
        first = swarm.watchers["archie"]
        killed.cancel()
        await asyncio.wait({killed})
        assert names_in(into) == ["cycle-000000002"]
        await stage.sleep_to(9)
        swarm.archive("archie", into, keep=9)
    assert names_in(into) == [f"cycle-{cycle:09d}" for cycle in (2, 4, 6, 8)]
    assert len(first.texts("export")) == 2, "the folder, and one export"
    again = [event.figures["cycle"] for event in swarm.watchers["archie"].events if "cycle" in event.figures]
    assert again[-2:] == [6, 8]
    assert 2 not in again
    assert swarm.watchers["archie"].last.incarnation == 2


@pytest.mark.long
async def test_a_founding_archivist_sends_the_state_to_a_joiner_when_all_trainers_are_gone(tmp_path: Path) -> None:
    stage, into = SessionStage(tmp_path), tmp_path / "exports"
    exports = ExportPlan(folder=into, every=EVERY, keep=9)
    watchers = {name: Watcher() for name in ("archie", "ada", "ben")}
    async with asyncio.TaskGroup() as tasks:
        founder = {"founds": True, "trains": False, "exports": exports, "until_round": 29}
        tasks.create_task(stage.play("archie", watchers["archie"], StopRequest(), **founder))
        ada = tasks.create_task(stage.play("ada", watchers["ada"], StopRequest()))
        await stage.sleep_to(10, seconds=3.0)
        ada.cancel()  # killed
        await asyncio.wait({ada})
        await stage.sleep_to(11)
        tasks.create_task(stage.play("ben", watchers["ben"], StopRequest(), until_round=29))
    assert watchers["ben"].last.state_digest == watchers["archie"].last.state_digest != ""
    assert watchers["ben"].last.bytes_received.transfer >= 8 * watchers["ben"].last.parameters
    assert watchers["ben"].last.entries_absorbed > 0
    assert watchers["archie"].last.role == "archivist"
    assert {"cycle-000000002", "cycle-000000004"} <= set(names_in(into))


@pytest.mark.long
async def test_an_archivist_that_lost_the_others_exports_nothing(tmp_path: Path) -> None:
    stage, into = SessionStage(tmp_path), tmp_path / "exports"
    stops = [StopRequest() for _ in range(3)]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.play("boot", Watcher(), stops[0], founds=True, trains=False))
        tasks.create_task(stage.play("ada", Watcher(), stops[1]))
        exports = ExportPlan(folder=into, every=1, keep=99)
        tasks.create_task(stage.play("archie", Watcher(), stops[2], trains=False, exports=exports))
        await stage.sleep_to(9, seconds=6.0)
        stage.network.isolate(peer_key("archie").peer)
        before = names_in(into)
        await stage.sleep_to(20)
        assert names_in(into) == before != [], "its state is not that of the cycles since"
        for stop in stops:
            stop.stop_now()


def heads(*places: tuple[int, bytes]) -> tuple[FragmentHead, ...]:
    return tuple(FragmentHead(round=index, digest=sha256(name)) for index, name in places)


A, B, C = (PeerId(bytes([number]) * 32) for number in range(3))


def test_a_cycle_is_over_when_most_members_hold_the_same_at_the_end_of_each_fragments_round() -> None:
    agreement = CompletedCycles(2)
    assert agreement.num_cycles == 0
    agreement.note(heads((0, b"a"), (-1, b"start")), {A: heads((0, b"a"), (-1, b"start"))}, 1)
    assert agreement.num_cycles == 0, "the second fragment had no round yet"
    agreement.note(heads((0, b"a"), (1, b"b")), {A: heads((0, b"a"), (1, b"other"))}, 1)
    assert agreement.num_cycles == 0, "the member holds something else"
    agreement.note(heads((0, b"a"), (1, b"b")), {A: heads((0, b"a"), (1, b"b")), B: (), C: ()}, 3)
    assert agreement.num_cycles == 0, "one of three is not enough"
    agreement.note(heads((0, b"a"), (1, b"b")), {A: (), B: heads((0, b"a"), (1, b"b"), (9, b"a")), C: ()}, 3)
    assert agreement.num_cycles == 1, "two of three, one after the other"
    agreement.note(heads((2, b"c"), (3, b"d")), {A: heads((0, b"a"), (1, b"b"))}, 1)
    assert agreement.num_cycles == 1, "what the member published is old"
    agreement.note(heads((4, b"e"), (3, b"d")), {A: heads((2, b"c"), (3, b"d"))}, 1)
    assert agreement.num_cycles == 2, "a member whose clock is behind names where this peer was"
    agreement.note(heads((4, b"e"), (5, b"f")), {A: heads((8, b"e"), (9, b"f"))}, 1)
    assert agreement.num_cycles == 2, "this peer was not there yet"


def test_a_state_that_this_peer_has_replaced_counts_from_the_beginning() -> None:
    agreement = CompletedCycles(1)
    agreement.note(heads((0, b"a")), {A: heads((0, b"a")), B: (), C: ()}, 3)
    agreement.note(heads((0, b"other")), {A: (), B: heads((0, b"other")), C: ()}, 3)
    assert agreement.num_cycles == 0, "each state has one of three"


def test_members_that_are_not_heard_count_too() -> None:
    agreement = CompletedCycles(1)
    for members, cycles in ((3, 0), (2, 0), (1, 1)):
        agreement.note(heads((0, b"a")), {A: heads((0, b"a"))}, members)
        assert agreement.num_cycles == cycles


def test_what_this_peer_held_long_ago_is_forgotten() -> None:
    agreement = CompletedCycles(1)
    for index in range(20):
        agreement.note(heads((index, b"%d" % index)), {}, 1)
    agreement.note(heads((20, b"20")), {A: heads((3, b"3"))}, 1)
    assert agreement.num_cycles == 0
    agreement.note(heads((20, b"20")), {A: heads((18, b"18"))}, 1)
    assert agreement.num_cycles == 19


OWN_MODEL: dict[str, Any] = {"model": describe_model(nn.Linear(40, 30)), "rounds": {"fragments": 2}}
REFUSED: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "a copy of another text": (
        {"data.fingerprint": "ab" * 32},
        {"data": "words.txt"},
        "has fingerprint .*, the run expects abababababababab",
    ),
    "a text for an own model": (
        OWN_MODEL,
        {"data": "words.txt"},
        '"small" trains its own model, whose held-out loss an archivist cannot measure; leave out --data',
    ),
    "tokens without a text": (
        {"data.path": "tokens", "data.tokenizer": "ab" * 32, "data.fingerprint": "cd" * 32},
        {},
        "need its tokenizer, which comes with its text; give the path of your copy of the text with --data PATH",
    ),
}


@pytest.mark.parametrize(("values", "settings", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_an_archivist_that_could_not_export_is_refused(
    tmp_path: Path, monkeypatch: Patch, values: Mapping[str, Any], settings: Mapping[str, Any], reason: str
) -> None:
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    manifest = draft_manifest(organiser=ORGANISER.peer, now_seconds=CLOCK_START, name="small", values=values)
    with pytest.raises(ConfigError, match=reason):
        Archivist(NOWHERE).check(PeerSettings(**settings), manifest)


def test_an_archivist_needs_no_text(tmp_path: Path) -> None:
    Archivist(NOWHERE).check(PeerSettings(), small_manifest())
    Archivist(NOWHERE).check(PeerSettings(), small_manifest({"data.path": "elsewhere"}))


class Recorder:
    """The reporter of an archivist that runs without a session."""

    def __init__(self) -> None:
        self.anchor_loss: float | None = None
        self.events: list[tuple[str, str]] = []

    def note(self, *, anchor_loss: float) -> None:
        self.anchor_loss = anchor_loss

    def report(self, topic: str, text: str, **figures: object) -> None:
        self.events.append((topic, text))

    def texts(self, topic: str) -> list[str]:
        return [text for its_topic, text in self.events if its_topic == topic]


class Alone:
    """An archivist whose disk holds a run with one entry a cycle, and whose engine says that others hold the same."""

    def __init__(self, folder: Path, plan: RunPlan, *, num_entries: int, text: SharedText | None = None) -> None:
        self.folder, self.plan, self.reporter = folder, plan, Recorder()
        self.level = -1
        start = {span: genesis_state(np.ones(n, np.float32), ROSTER) for span, n in plan.rules.span_elements.items()}
        self.archive = Archive(folder, plan=plan, keep=3, soon=lambda write: write(), report=self.reporter.report)
        self.archive.save(start)
        self.states = start
        for span, state in start.items():
            entries, states = log_of(plan, span, state, num_entries)
            for entry in entries:
                self.archive.keep_entry(entry)
            if states:
                self.states = self.states | {span: states[-1]}
        beat = SimpleNamespace(heads=(), ready=True)
        engine: Any = SimpleNamespace(
            ready=True,
            closed_heads=lambda now: self._set_heads(beat),
            conditions=SimpleNamespace(is_paused=False),
            membership=SimpleNamespace(liveness=SimpleNamespace(alive=lambda now: {"ada": beat})),
            book=SimpleNamespace(in_force=SimpleNamespace(peers=lambda: {"ada"})),
        )
        reporter: Any = self.reporter
        self.archivist = Archivist(ExportPlan(folder=folder / "exports", every=1, keep=9))
        self._host = TrainingHost(
            plan=plan,
            peer=peer_key("archie").peer,
            incarnation=1,
            settings=PeerSettings(),
            folder=folder,
            now=lambda: 0.0,
            in_loop=lambda call: call(),
            died=lambda error: None,
            damaged=lambda span, reason: None,
            reporter=reporter,
            engine=engine,
            archive=self.archive,
            written=lambda: asyncio.sleep(0),
            text=text,
        )
        self.begin()

    def begin(self) -> Archivist:
        """Begin a session."""
        self._held = self.archivist.open(self._host)
        self._held.hold(self.states)
        return self.archivist

    def _set_heads(self, beat: Any) -> tuple[FragmentHead, ...]:
        """Let the other peer hold the same up to the end of cycle `level`."""
        num_fragments = self.plan.rules.clock.num_fragments
        beat.heads = heads(*((self.level * num_fragments + f, b"%d" % self.level) for f in range(num_fragments)))
        return tuple(beat.heads)

    def move(self, span: SpanId, state: SpanState) -> None:
        self.states = self.states | {span: state}
        self._held.hold(self.states)

    async def reach(self, num_cycles: int) -> None:
        """Let this many cycles be over for all, and one more."""
        self.level = num_cycles
        await asyncio.sleep(3.0)

    def names(self) -> list[str]:
        return names_in(self.folder / "exports")


def test_exports_of_an_own_model_hold_the_trained_tensors_and_no_loss(tmp_path: Path) -> None:
    values = {"model": describe_model(nn.Linear(40, 30)), "rounds": {"clock_start": CLOCK_START, "fragments": 2}}
    values["data"] = {"path": "books", "tokenizer": "ab" * 32, "fingerprint": "cd" * 32}  # unused by the run's own loop
    manifest = draft_manifest(organiser=ORGANISER.peer, now_seconds=CLOCK_START, name="own", values=values)

    async def scene() -> None:
        alone = Alone(tmp_path, plan_run(manifest), num_entries=3)
        running = asyncio.ensure_future(alone.archivist.serve())
        await alone.reach(2)
        assert alone.names() == ["cycle-000000002"]
        tensors = load((tmp_path / "exports" / "cycle-000000002" / "model.safetensors").read_bytes())
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {"weight": (30, 40), "bias": (30,)}
        assert alone.reporter.texts("evaluation") == []
        running.cancel()

    run_virtual(scene())


def test_a_full_disk_skips_one_export_and_leaves_the_older_ones(tmp_path: Path, monkeypatch: Patch) -> None:
    mkdir = Path.mkdir

    def refuse(self: Path, *arguments: Any, **named: Any) -> None:
        if "cycle-000000002" in self.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(self, *arguments, **named)

    async def scene() -> None:
        alone = Alone(tmp_path, small_plan({"data.path": "elsewhere"}), num_entries=3)
        running = asyncio.ensure_future(alone.archivist.serve())
        for num_cycles in (1, 2, 3):
            await alone.reach(num_cycles)
        assert alone.reporter.texts("export")[2] == (
            f"cycle 2 was not exported: cannot write the folder {tmp_path / 'exports' / 'cycle-000000002'}: No space "
            "left on device; check the disk, or name another folder; cycle 3 is next"
        )
        assert alone.names() == ["cycle-000000001", "cycle-000000003"]
        running.cancel()

    monkeypatch.setattr(Path, "mkdir", refuse)
    run_virtual(scene())


def test_a_session_begins_only_after_the_export_of_an_earlier_one(tmp_path: Path, monkeypatch: Patch) -> None:
    """It tidies the folder, and would take the export for one that a crash has left."""
    begun, released, write = threading.Event(), threading.Event(), ExportFolder.write

    def slow_write(self: ExportFolder, *arguments: Any) -> Any:
        begun.set()
        assert released.wait(30.0)
        return write(self, *arguments)

    monkeypatch.setattr(ExportFolder, "write", slow_write)
    monkeypatch.setattr(archivist, "LOOK_SECONDS", 0.0)

    async def scene() -> None:
        alone = Alone(tmp_path, small_plan({"data.path": "elsewhere"}), num_entries=3)
        alone.level = 2
        running = asyncio.ensure_future(alone.archivist.serve())
        assert await asyncio.to_thread(begun.wait, 30.0)
        running.cancel()
        await asyncio.wait({running})
        await alone.archivist.end()
        again = asyncio.ensure_future(alone.begin().serve())
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert len(alone.reporter.texts("export")) == 1, "it has not opened the folder again"
        released.set()
        while len(alone.reporter.texts("export")) < 2:
            await asyncio.sleep(0.01)
        again.cancel()
        assert alone.names() == ["cycle-000000002"]

    asyncio.run(scene())


def test_a_state_that_has_not_changed_or_is_not_on_the_disk_is_not_exported(tmp_path: Path) -> None:
    async def scene() -> None:
        alone = Alone(tmp_path, small_plan({"data.path": "elsewhere"}), num_entries=2)
        running = asyncio.ensure_future(alone.archivist.serve())
        for num_cycles in (2, 3):
            await alone.reach(num_cycles)
        assert alone.names() == ["cycle-000000002"]
        span = next(iter(alone.states))
        moved = follow(alone.plan, alone.states[span], entry_after(alone.plan, span, alone.states[span].head))
        alone.move(span, moved)
        await alone.reach(4)
        assert alone.reporter.texts("export")[2:] == [
            "cycle 3 was not exported: nothing has changed since cycle-000000002; cycle 4 is next",
            "cycle 4 was not exported: the checkpoints and entries on this disk do not lead to its end; cycle 5 is "
            "next",
        ]
        assert alone.reporter.texts("evaluation") == [
            "the held-out loss is not measured, because it needs a copy of the run's text: --data PATH"
        ]
        running.cancel()

    run_virtual(scene())


BUNDLE = TokenizerFiles({"tokenizer.json": '{"model": {}}'}).encode()


def token_text(folder: Path) -> ShardIndex:
    """Write a text of tokens below 300: two shards, and a held-out one."""
    folder.mkdir()
    (folder / TOKENIZER_FILE).write_bytes(BUNDLE)

    def shard(name: str) -> Shard:
        raw = np.random.default_rng(len(name)).integers(0, 300, size=2_000, dtype=np.uint16).tobytes()
        (folder / name).write_bytes(raw)
        return Shard(name=name, tokens=2_000, sha256=sha256(raw).hex())

    index = ShardIndex(
        vocabulary=300,
        tokenizer=sha256(BUNDLE).hex(),
        end_token=None,
        bytes_per_token=3.5,
        sources=(Source(name="books", weight=1.0, shards=(shard("s-0.bin"), shard("s-00.bin"))),),
        held_out=(shard("held-out-0.bin"),),
    )
    (folder / INDEX_FILE).write_bytes(index.encode())
    return index


def test_a_shared_text_is_fetched_for_the_tokenizer_and_the_loss(tmp_path: Path) -> None:
    index = token_text(tmp_path / "own")
    own = list_own_text(str(tmp_path / "own"))
    assert own.listed is not None
    listed = own.listed
    values = {
        "model.vocabulary": 300,
        "data.path": "books",
        "data.tokenizer": index.tokenizer,
        "data.fingerprint": index.digest.hex(),
        "data.share": True,
        "data.files": own.digest.hex(),
    }
    store = TextStore(tmp_path / "store", own.digest)

    def arrive(*names: str) -> None:
        for number, file in enumerate(listed.files):
            if file.name in names:
                for piece in listed.pieces_of(number):
                    _, content = own.read(listed.piece(piece).digest, 0, FILE_PIECE_BYTES)
                    assert store.keep(piece, content)

    async def scene() -> None:
        alone = Alone(tmp_path / "run", small_plan(values), num_entries=4, text=SharedText(store))
        running = asyncio.ensure_future(alone.archivist.serve())
        await alone.reach(1)
        assert not (tmp_path / "run" / "exports").exists(), "the tokenizer is part of an export"
        assert store.adopt(listed.encode())
        arrive(INDEX_FILE, TOKENIZER_FILE)
        await alone.reach(1)
        assert alone.names() == ["cycle-000000001"]
        assert (tmp_path / "run" / "exports" / "cycle-000000001" / "tokenizer.json").read_bytes() == b'{"model": {}}'
        assert alone.reporter.anchor_loss is None
        arrive("held-out-0.bin")
        await alone.reach(2)
        await alone.reach(3)
        assert alone.reporter.anchor_loss is not None, alone.reporter.events
        assert not SharedText(store).is_whole(), "only the held-out part is needed"
        running.cancel()

    (tmp_path / "run").mkdir()
    run_virtual(scene())
