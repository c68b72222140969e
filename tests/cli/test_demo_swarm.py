"""The demo's timeline with fake peers in virtual time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from p2p_diloco.cli.demo_plan import BOOTSTRAP, LONE, DemoOptions, DemoPlan, plan_demo
from p2p_diloco.cli.demo_swarm import FINISH_SECONDS, START_SECONDS, DemoStory, DemoSwarm, RunFiles
from p2p_diloco.errors import P2PDilocoError

sys.path.insert(0, str(Path(__file__).parent))
from pretence import INVITE, PretendedChildren, VirtualClock

START = 1e9


class Stage:
    """One demo in which everything is fake."""

    def __init__(self, root: Path, options: DemoOptions, **weather: object) -> None:
        self.plan: DemoPlan = plan_demo(options, now_seconds=START)
        self.clock = VirtualClock(START)
        end = self.plan.clock_start + self.plan.end_at
        self.children = PretendedChildren(root, self.clock, end=end, **weather)  # type: ignore[arg-type]
        self.said: list[str] = []

    def run(self) -> DemoStory:
        files = RunFiles(swarm=Path("run.toml"), lone=Path("lone.toml"))
        swarm = DemoSwarm(self.plan, children=self.children, clock=self.clock, show=self.said.append, run_files=files)
        return swarm.run()


def test_events_follow_the_plan(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DemoOptions(peers=4, seconds=100.0))
    story, plan = stage.run(), stage.plan
    assert list(story.started) == [BOOTSTRAP, *plan.peers]
    assert list(story.killed) == [plan.victim, BOOTSTRAP]
    assert story.exit_codes == {name: 0 for name in plan.peers if name != plan.victim}
    since = {name: time - plan.clock_start for name, time in {**story.started, **story.killed}.items()}
    assert since[plan.late] == pytest.approx(plan.late_at, abs=1.0)
    assert since[plan.victim] == pytest.approx(plan.kill_at, abs=1.0)
    assert since[BOOTSTRAP] == pytest.approx(plan.bootstrap_kill_at, abs=1.0)


def test_every_peer_joins_with_the_printed_invite_and_ends_with_its_parent(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DemoOptions(peers=4, seconds=60.0, data="text.txt"))
    stage.run()
    assert stage.children.arguments[BOOTSTRAP][:2] == ["bootstrap", "run.toml"]
    assert "--data" not in stage.children.arguments[BOOTSTRAP]
    for name in stage.plan.peers:
        arguments = stage.children.arguments[name]
        assert arguments[:2] == ["join", INVITE]
        assert arguments[-2:] == ["--data", "text.txt"]
        assert "--with-parent" in arguments
        assert arguments[arguments.index("--until-round") + 1] == str(stage.plan.last_round)
        assert arguments[arguments.index("--host-maddrs") + 1] == "/ip4/127.0.0.1/tcp/0"


def test_a_lone_island_founds_its_own_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DemoOptions(peers=4, seconds=60.0, with_lone=True))
    story = stage.run()
    assert stage.children.arguments[LONE][:3] == ["join", "--found", "lone.toml"]
    assert story.exit_codes[LONE] == 0


def test_kills_wait_until_they_can_be_survived_but_not_forever(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DemoOptions(peers=4, seconds=100.0), deaf=("peer-4",))
    story, plan = stage.run(), stage.plan
    assert story.killed[plan.victim] - plan.clock_start == pytest.approx(plan.kill_at, abs=1.0)
    assert story.killed[BOOTSTRAP] - plan.clock_start == pytest.approx(0.9 * plan.end_at, abs=1.0)


def test_a_peer_that_dies_by_itself_ends_the_demo_with_its_last_line(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DemoOptions(peers=4, seconds=60.0), broken=("peer-1",))
    with pytest.raises(P2PDilocoError, match="peer-1 exited with code 3 before the last round; its last line: Traceb"):
        stage.run()


def test_a_bootstrap_peer_that_prints_no_invite_is_given_up(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DemoOptions(peers=4, seconds=60.0), says="hello 'there\nhello\n")
    with pytest.raises(P2PDilocoError, match="the bootstrap printed no join command within 90 s; its last line: hel"):
        stage.run()
    assert stage.clock.time() == pytest.approx(START + START_SECONDS, abs=1.0)


def test_a_bootstrap_peer_that_dies_is_reported(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DemoOptions(peers=4, seconds=60.0), broken=(BOOTSTRAP,))
    with pytest.raises(P2PDilocoError, match="bootstrap exited with code 3"):
        stage.run()


def test_a_peer_that_does_not_finish_is_not_waited_for_forever(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DemoOptions(peers=4, seconds=60.0), stuck=("peer-3",))
    story = stage.run()
    assert "peer-3" not in story.exit_codes
    assert stage.said[-1] == f"peer-3 did not finish within {FINISH_SECONDS:g} s"


def test_a_peer_that_fails_at_the_very_end_is_noted_for_the_verdict(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DemoOptions(peers=4, seconds=60.0), failing=("peer-3",))
    assert stage.run().exit_codes["peer-3"] == 4


def test_progress_is_shown(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DemoOptions(peers=4, seconds=60.0))
    stage.run()
    assert any("4 of 4 volunteers ready" in line or "3 of 3 volunteers ready" in line for line in stage.said)
    assert any(line.endswith("peer-2 is killed (kill -9)") for line in stage.said)
