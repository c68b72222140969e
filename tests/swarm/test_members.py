"""Three real peers see each other's names, and `members --credit` gives the same sums at all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.app.cli.app import main
from p2p_diloco.protocol.round import credit
from p2p_diloco.storage import member_files
from tests.swarm.process_swarm import ProcessSwarm
from tests.swarm.test_faults import end_together

BLOCK_CYCLES = 3

pytestmark = [pytest.mark.wall_clock, pytest.mark.slow, pytest.mark.timeout(240)]


def printed(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["members", *words, "--json", "--state-directory", str(folder)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_three_peers_credit_the_same_tokens_for_all_cycles_that_they_cover(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (credit, member_files):
        monkeypatch.setattr(module, "BLOCK_CYCLES", BLOCK_CYCLES)
    names = {"ada": "Łódź", "ben": "ben's [red]", "cleo": ""}
    with ProcessSwarm(patience_seconds=120.0) as swarm:
        for name in ("ada", "ben"):
            swarm.start(name, founds=name == "ada", block_cycles=BLOCK_CYCLES, called=names[name])
        swarm.wait_for_whole_round(["ada", "ben"], 2, since=0.0)
        swarm.start("cleo", block_cycles=BLOCK_CYCLES, called=names["cleo"])
        swarm.wait_for_whole_round([*names], 3, since=0.0, lasting=True)
        swarm.sleep_rounds(4 * BLOCK_CYCLES * swarm.manifest.rounds.fragments)
        ids = {name: swarm.peers[name].status.peer for name in names}
        running = printed(capsys, swarm.peers["ada"].folder)
        assert {member["state"] for member in running["members"]} <= {"member", "not listed"}
        lines = {line.peer: line.name for line in swarm.peers["cleo"].status.peers}
        assert lines == {ids["ada"]: "Łódź", ids["ben"]: "ben's [red]"}
        end_together(swarm, [*names])

        shown = {name: printed(capsys, swarm.peers[name].folder, "--credit") for name in names}
        blocks = {
            name: {str(block["cycles"]): block["token_spans"] for block in found["blocks"] if block["complete"]}
            for name, found in shown.items()
        }
        common = set.intersection(*(set(found) for found in blocks.values()))
        assert len(common) >= 2, shown
        for cycles in common:
            assert blocks["ada"][cycles] == blocks["ben"][cycles] == blocks["cleo"][cycles]
            assert set(blocks["ada"][cycles]) == set(ids.values())
        first = {name: found["covers"][0][0] for name, found in shown.items()}
        assert 0 <= first["ada"] <= first["cleo"], "it came later"
        assert first["cleo"] > 0
        assert {member["peer"]: member["name"] for member in shown["cleo"]["members"]} == {
            ids[name]: text for name, text in names.items()
        }
        found = printed(capsys, swarm.peers["cleo"].folder)["members"]
        assert {member["peer"]: member["name"] for member in found} == {ids[name]: text for name, text in names.items()}
        claimed = {member["peer"]: member["claimed_tokens"] for member in found}
        assert min(claimed.values()) > 0
