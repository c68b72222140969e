"""A status as a table and as a line."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from p2p_diloco.app.cli.status_table import MAX_PEER_ROWS, StatusTable, status_line
from p2p_diloco.status.status_file import ByteCounts, PeerLine, PeerStatus

STATUS = PeerStatus(
    run="ab" * 32,
    run_name="night [bold]run[/bold]",
    peer="12D3KooWFFAFvBNKmfhmUuCEaWMf1VfggeKQERH8Mvx289SF58mp",
    round=117,
    cycle=29,
    num_members=4,
    num_ready=3,
    phase="training",
    loss=2.5,
    anchor_loss=2.4,
    tokens_per_second=12_345.0,
    participation=0.97,
    bytes_sent=ByteCounts(vectors=1_000_000, control=200_000),
    peers=(
        PeerLine(peer="12D3KooWabcdefgh1111", ready=True, reachable=True, steps=12, seconds_since_heard=0.4),
        PeerLine(peer="12D3KooWabcdefgh2222", trains=False, seconds_since_heard=40.0),
    ),
)


def shown(status: PeerStatus, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(StatusTable(status))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_peers_round_loss_speed_participation_and_bytes() -> None:
    text = shown(STATUS)
    run = ("round 117", "3 of 4 trainers ready", "2.500", "2.400", "12.3k", "97.0 %", "1.2 MB")
    for part in (*run, "..efgh1111", "0.4 s ago"):
        assert part in text


def test_a_peer_with_a_name_is_shown_with_it_before_its_id() -> None:
    other = replace(STATUS.peers[0], name="bo [red]")
    text = shown(replace(STATUS, name="ada", peers=(other, STATUS.peers[1])))
    for part in ("trainer ada (..89SF58mp)", "bo [red] (..efgh1111)", "\n..efgh2222"):
        assert part in text


def test_shares_of_tokens_are_marked_as_claimed_and_stand_beside_shares_of_the_weight() -> None:
    other = replace(STATUS.peers[0], claimed_token_share=0.05, weight=0.4, cycle_steps=5.25)
    status = replace(STATUS, claimed_token_share=0.8, weight=0.2, peers=(other,))
    for shape in (shown, status_line):
        assert "this peer: tokens 80.0 % (as members claim them), weight 20.0 %" in shape(status)
        assert "claim them" not in shape(STATUS), "nothing is known"
    header, line = shown(status).splitlines()[-2:]
    assert header.split()[-3:] == ["claimed", "weight", "steps/cycle"]
    assert line.split()[-5:] == ["5.0", "%", "40.0", "%", "5.2"]


def test_the_group_of_a_peer_is_shown_where_there_are_several() -> None:
    peers = (replace(STATUS.peers[0], row=1),)
    assert "group" not in shown(replace(STATUS, peers=peers))
    header, line = shown(replace(STATUS, peers=peers, grid=(2, 2))).splitlines()[-2:]
    assert header.split()[-1] == "group"
    assert line.split()[-1] == "2"


def test_how_far_the_run_is_stands_in_each_line_and_that_no_end_is_set_only_in_the_table() -> None:
    planned = replace(STATUS, share_done=0.38, seconds_left=3 * 86400.0)
    for shape in (shown, status_line):
        assert "38 % · about 3 days left" in shape(planned)
    assert shown(STATUS).count("no end set") == 1
    assert "no end set" not in status_line(STATUS)


def test_undone_steps_are_noted() -> None:
    for shape in (shown, status_line):
        assert "2 steps undone, because of a NaN or an infinity" in shape(replace(STATUS, steps_undone=2))
        assert "undone" not in shape(STATUS)


def test_the_share_of_its_length_that_was_sent_is_shown_only_if_something_was_clipped() -> None:
    for shape in (shown, status_line):
        text = shape(replace(STATUS, length_learnt=8.0, length_sent=5.0))
        assert "length sent" in text
        assert "62.5 %" in text
        for learnt, sent in ((0.0, 0.0), (5.0, 5.0), (4.0, 5.0)):
            assert "length sent" not in shape(replace(STATUS, length_learnt=learnt, length_sent=sent))


def test_members_that_were_changed_without_a_majority_are_noted() -> None:
    note = "the list of members was changed without a majority 2 times"
    assert note in shown(replace(STATUS, degraded_rosters=2))
    assert "majority" not in shown(STATUS)


def test_peers_that_do_not_train_or_only_dial_out_are_marked() -> None:
    serving = replace(STATUS.peers[1], seconds_since_heard=0.4)
    line = next(line for line in shown(replace(STATUS, peers=(serving,))).splitlines() if "2222" in line)
    assert "serving, dials out" in line


def test_a_peer_without_recent_heartbeats_is_silent_whatever_its_last_state() -> None:
    def line(peer: PeerLine) -> str:
        return next(line for line in shown(replace(STATUS, peers=(peer,))).splitlines() if "1111" in line)

    killed, gone = STATUS.peers[0], PeerLine(peer="12D3KooWabcdefgh1111", reachable=True)
    assert "silent" not in line(replace(killed, seconds_since_heard=9.9))
    assert "ready" not in line(replace(killed, seconds_since_heard=10.1))
    assert "catching up" not in line(replace(gone, seconds_since_heard=20.0))
    for peer in (replace(killed, seconds_since_heard=10.1), replace(gone, seconds_since_heard=20.0)):
        assert "silent" in line(peer)
    assert "silent" in line(replace(killed, trains=False, seconds_since_heard=20.0))


def test_a_name_from_the_swarm_cannot_style_the_terminal() -> None:
    assert "night [bold]run[/bold]" in shown(STATUS)


def test_a_large_swarm_is_truncated() -> None:
    peers = tuple(PeerLine(peer=f"peer{number:06d}", seconds_since_heard=1.0) for number in range(MAX_PEER_ROWS + 3))
    text = shown(PeerStatus(peers=peers, leaving=True))
    assert "and 4 more: 4 catching up" in text
    assert "catching up" in text
    assert "leaving" in text


def test_a_peer_that_left_is_finished_and_a_bootstrap_peer_serves() -> None:
    assert "finished" in shown(replace(STATUS, phase="finished", leaving=True))
    serving = replace(STATUS, role="bootstrap", phase="serving")
    assert "serving" in shown(serving)
    assert "serving" in status_line(serving)


def test_steps_per_cycle_are_shown_and_many_more_than_planned_add_a_note() -> None:
    status = replace(STATUS, cycle_steps=23.4, pace="a cycle has 50 inner steps here, 23 were planned")
    assert "23.4" in shown(status)
    assert "23 were planned\n" in shown(status)
    assert status_line(status).endswith(", a cycle has 50 inner steps here, 23 were planned")


def test_a_line_labels_every_number() -> None:
    assert status_line(STATUS) == (
        "round 117, training, 3 of 4 trainers ready, loss 2.500, shared model 2.400, 12.3k tokens/s, steps 0, "
        "participation 97.0 %, sent 1.2 MB, received 0 B"
    )


def test_the_table_shows_whether_others_reach_this_peer() -> None:
    assert "outbound only: because" in shown(replace(STATUS, reach="outbound only: because"))


def test_training_is_not_green_while_nothing_is_learnt() -> None:
    def coloured(status: PeerStatus) -> str:
        console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
        console.print(StatusTable(status))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    green, stuck = "\x1b[32mtraining", replace(STATUS, trouble="in no entry for 3 cycles: why")
    assert green in coloured(STATUS)
    assert green not in coloured(stuck)
    assert "in no update of the shared model for 3 cycles: why" in shown(stuck)
    assert status_line(stuck).endswith("in no update of the shared model for 3 cycles: why")


@pytest.mark.parametrize(
    ("ready", "members", "part"),
    [
        (0, 0, "no trainer listed yet"),
        (1, 1, "1 of 1 trainer ready"),
        (2, 1, "1 of 1 trainer ready"),
        (0, 2, "0 of 2 trainers ready"),
    ],
)
def test_the_number_of_ready_trainers_never_exceeds_all_trainers(ready: int, members: int, part: str) -> None:
    status = replace(STATUS, num_ready=ready, num_members=members)
    assert f", {part}, " in status_line(status)
    assert part in shown(status).splitlines()[0]


def test_a_paused_peer_shows_until_when_and_others_see_it_as_paused() -> None:
    paused = replace(STATUS, phase="paused", paused="paused until 22:00 (hours)")
    assert "paused until 22:00 (hours)" in shown(paused)
    assert "paused until 22:00 (hours)" in status_line(paused)
    assert "leaving" in status_line(replace(paused, leaving=True))
    seen = PeerLine(peer="12D3KooWabcdefgh3333", reachable=True, steps=12, seconds_since_heard=0.4)
    states = [
        replace(seen, tokens_per_second=0.0),
        replace(seen, tokens_per_second=5.0),
        replace(seen, tokens_per_second=0.0, steps=0),
        replace(seen, tokens_per_second=0.0, ready=True),
    ]
    lines = [
        next(line for line in shown(replace(STATUS, peers=(each,))).splitlines() if "3333" in line) for each in states
    ]
    words = ("paused", "catching up", "catching up", "ready")
    assert all(word in line for word, line in zip(words, lines, strict=True))


def test_a_limit_of_the_disk_is_shown() -> None:
    assert "a limit of the disk is reached: writes nothing" in shown(replace(STATUS, disk_saving="nothing"))
    assert "limit of the disk" not in shown(STATUS)
