"""The page: its numbers are those of the status, strangers learn and change nothing, and the owner changes things."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from pages import INVITE, OTHER, PEER, RUN, a_peer, a_status
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from p2p_diloco.app.page.access import REQUESTS_AT_ONCE, Budgets, Token
from p2p_diloco.app.page.site import PagePlan, hosts_of, make_site
from p2p_diloco.guest.owner_files import Control, read_control
from p2p_diloco.ids import Digest, PeerId, format_peer_id
from p2p_diloco.status.event_log import PeerEvent, append_event
from p2p_diloco.status.status_file import read_status, write_status
from p2p_diloco.storage.member_files import MEMBERS_FILE, MemberRecord, Members, encode_members
from p2p_diloco.storage.run_folder import run_folder

PORT = 31380
HOST = f"127.0.0.1:{PORT}"
SECRET = "5e" * 16


def a_site(*folders: Path, is_public: bool = False) -> TestClient:
    plan = PagePlan(
        folders=folders,
        is_public=is_public,
        hosts=frozenset() if is_public else hosts_of(PORT),
        token=None if is_public else Token(SECRET, PORT),
        samples=False,
    )
    return TestClient(make_site(plan), base_url=f"http://{HOST}", follow_redirects=False)


def an_owner(*folders: Path) -> TestClient:
    """Return a visitor who has opened the address with the token."""
    site = a_site(*folders)
    assert site.get(f"/?token={SECRET}").status_code == 303
    return site


@contextmanager
def an_obedient_peer(folder: Path, **changes: object) -> Iterator[list[Control]]:
    """Answer requests in `folder` as a peer does, while inside."""
    obeyed: list[Control] = []
    end = threading.Event()

    def obey() -> None:
        while not end.wait(0.01):
            control = read_control(folder)
            if control.number and (not obeyed or obeyed[-1].number != control.number):
                obeyed.append(control)
                write_status(folder, a_status(control=control.number, limits=control.limits, **changes))

    thread = threading.Thread(target=obey)
    thread.start()
    try:
        yield obeyed
    finally:
        end.set()
        thread.join()


def figure(text: str, name: str) -> str:
    found = re.search(rf'<dt>{name}</dt><dd><data value="([^"]+)"', text)
    assert found is not None, name
    return found[1]


def test_the_numbers_are_those_of_the_status(tmp_path: Path) -> None:
    status = a_peer(tmp_path)
    text = a_site(tmp_path).get("/").text
    assert float(figure(text, "loss of the shared model")) == status.anchor_loss
    assert float(figure(text, "contributions that count")) == status.participation
    assert int(figure(text, "machines ready")) == status.num_ready
    assert float(figure(text, "tokens per second, all together")) == 1_500.0
    assert int(figure(text, "tokens")) == status.tokens
    assert "2.125" in text
    assert "3 machines now train it together" in text


def test_a_change_of_the_files_is_on_the_next_page(tmp_path: Path) -> None:
    a_peer(tmp_path)
    site = a_site(tmp_path)
    assert "41" in figure(site.get("/").text, "round")
    write_status(tmp_path, a_status(round=42))
    assert figure(site.get("/").text, "round") == "42"


def test_rounds_are_shown_as_full_partial_and_skipped(tmp_path: Path) -> None:
    a_peer(tmp_path)
    text = a_site(tmp_path).get("/").text
    assert re.findall(r'<li class="(full|partial|skipped)"', text) == ["full", "partial", "skipped"]
    assert "round 39: 3 of 4 parts of the model averaged, 6 of 8 contributions" in text


@pytest.mark.parametrize(
    ("sort", "down", "names"),
    [
        ("tokens", "1", ["this machine", "..BobBob02", "..KooWCat03"]),
        ("tokens", "0", ["..BobBob02", "this machine", "..KooWCat03"]),
        ("state", "0", ["..KooWCat03", "this machine", "..BobBob02"]),
        ("nonsense", "x", ["this machine", "..BobBob02", "..KooWCat03"]),
    ],
)
def test_machines_are_sorted_by_a_column_with_unknown_values_last(
    tmp_path: Path, sort: str, down: str, names: list[str]
) -> None:
    a_peer(tmp_path)
    text = an_owner(tmp_path).get(f"/?sort={sort}&down={down}").text
    found = re.findall(r'<th scope="row"><bdi[^>]*>([^<]+)</bdi>', text)
    assert [name.replace("..oBob02", "..BobBob02") for name in found] == [short(name) for name in names]


def short(name: str) -> str:
    return name if name == "this machine" else f"..{name[2:][-8:]}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"trouble": "no entry includes this peer"}, "No update includes this peer."),
        ({"clock": "this machine's clock is 40 s ahead"}, "clock is 40 s ahead."),
        ({"pid": 0}, "peer is not running; its last status is from"),
        ({"updated_before": 30.0}, "This peer has written no status for 3"),
        ({"steps_undone": 2}, "2 steps undone here, because of a NaN or an infinity."),
        ({"disk_saving": "nothing"}, "A limit of the disk is reached: this peer writes nothing."),
    ],
)
def test_what_is_wrong_comes_first_with_what_to_do(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    age = changes.pop("updated_before", 0.0)
    a_peer(tmp_path, **changes, updated=time.time() - float(str(age)))
    text = an_owner(tmp_path).get("/").text
    assert sentence in text.replace("&#39;", "'")
    assert text.index("Needs attention") < text.index("The run</h2>")


def test_a_peer_that_has_ended_is_not_shown_as_training(tmp_path: Path) -> None:
    a_peer(tmp_path, pid=0)
    text = a_site(tmp_path).get("/").text
    assert "When this machine last followed it, 3 machines took part." in text
    assert text.count("not running") == 3, "in the first line, in the table, and below This machine"


def test_nothing_is_wrong_on_a_page_of_a_run_that_is_well(tmp_path: Path) -> None:
    a_peer(tmp_path)
    assert "Needs attention" not in a_site(tmp_path).get("/").text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:31380", "127.0.0.1", "127.0.0.1:31381", ""])
def test_a_foreign_host_is_refused(tmp_path: Path, host: str) -> None:
    a_peer(tmp_path)
    for path in ("/", "/live", "/metrics", "/page.js"):
        answer = a_site(tmp_path).get(path, headers={"host": host})
        assert (answer.status_code, "Tales" in answer.text) == (403, False)


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:9999", "null"])
def test_a_foreign_origin_is_refused_even_with_the_token(tmp_path: Path, origin: str) -> None:
    a_peer(tmp_path)
    answer = an_owner(tmp_path).post("/do/leave", data={"peer": "0", "sure": "yes"}, headers={"origin": origin})
    assert answer.status_code == 403
    assert read_control(tmp_path) == Control()


@pytest.mark.parametrize("what", ["pause", "resume", "limit", "leave"])
def test_nothing_is_changed_without_the_token(tmp_path: Path, what: str) -> None:
    a_peer(tmp_path)
    site = a_site(tmp_path)
    assert site.get("/?token=wrong").status_code == 303
    assert site.post(f"/do/{what}", data={"peer": "0", "sure": "yes"}).status_code == 403
    assert read_control(tmp_path) == Control()
    assert "<button>" not in site.get("/").text


def test_the_owner_pauses_limits_and_resumes_and_reads_the_peers_answer(tmp_path: Path) -> None:
    a_peer(tmp_path)
    site = an_owner(tmp_path)
    with an_obedient_peer(tmp_path, paused="paused until 22:00") as obeyed:
        answer = site.post("/do/pause", data={"peer": "0", "for": "1h"}, headers={"origin": f"http://{HOST}"})
        assert answer.status_code == 303
        assert "paused until 22:00" in site.get(f"/{answer.headers['location'][3:]}").text
        site.post("/do/limit", data={"peer": "0", "key": "max_upload", "value": "5mbit"})
        site.post("/do/resume", data={"peer": "0"})
    assert [control.pauses for control in obeyed] == [True, True, False]
    assert obeyed[-1].limits == {"max_upload": "5mbit"}


@pytest.mark.parametrize(
    ("path", "form", "words"),
    [
        ("/do/limit", {"key": "max_upload", "value": "much"}, "not+done"),
        ("/do/limit", {"key": "../evil", "value": "1"}, "not+done"),
        ("/do/pause", {"for": "soon"}, "not+done"),
        ("/do/leave", {}, "tick+the+box"),
    ],
)
def test_a_bad_form_is_answered_and_changes_nothing(
    tmp_path: Path, path: str, form: dict[str, str], words: str
) -> None:
    a_peer(tmp_path)
    answer = an_owner(tmp_path).post(path, data={"peer": "0", **form})
    assert words in answer.headers["location"]
    assert read_control(tmp_path) == Control()


@pytest.mark.parametrize(
    ("path", "data", "code"),
    [("/do/dance", {"peer": "0"}, 404), ("/do/pause", {"peer": "7"}, 404), ("/do/pause", {"peer": "9" * 20_000}, 413)],
)
def test_requests_that_the_page_does_not_know_are_refused(
    tmp_path: Path, path: str, data: dict[str, str], code: int
) -> None:
    a_peer(tmp_path)
    assert an_owner(tmp_path).post(path, data=data).status_code == code


def test_a_public_page_shows_no_address_key_id_or_event_and_changes_nothing(tmp_path: Path) -> None:
    a_peer(tmp_path, trouble=f"cannot dial {OTHER} at 203.0.113.9", influence=(f"{OTHER[-8:]} has half of the weight",))
    site = a_site(tmp_path, is_public=True)
    everything = "".join(site.get(path).text for path in ("/", "/?sort=seen", "/metrics", f"/?token={SECRET}"))
    assert "Tales" in everything
    for secret in (PEER[-8:], OTHER[-8:], "203.0.113", INVITE, "p2pdiloco://", "3 members (new", str(tmp_path)):
        assert secret not in everything
    assert site.post("/do/leave", data={"peer": "0", "sure": "yes"}).status_code == 404


def test_a_private_page_without_the_token_shows_no_more_than_a_public_one(tmp_path: Path) -> None:
    a_peer(tmp_path, trouble=f"cannot dial {OTHER} at 203.0.113.9")
    text = a_site(tmp_path).get("/").text
    assert "Tales" in text
    for secret in (OTHER[-8:], "203.0.113", "p2pdiloco://", "3 members (new"):
        assert secret not in text
        assert secret in an_owner(tmp_path).get("/").text


def test_a_public_page_answers_any_host_but_an_address_only_so_often(tmp_path: Path) -> None:
    a_peer(tmp_path)
    site = a_site(tmp_path, is_public=True)
    codes = [
        site.get("/page.css", headers={"host": "tales.example"}).status_code for _ in range(int(REQUESTS_AT_ONCE) + 20)
    ]
    assert codes[:10] == [200] * 10
    assert codes[-1] == 429


def test_an_address_that_waits_may_ask_again() -> None:
    now = 0.0
    budgets = Budgets(lambda: now)
    assert sum(budgets.takes("a") for _ in range(100)) == REQUESTS_AT_ONCE
    assert budgets.takes("b")
    now = 1.0
    assert sum(budgets.takes("a") for _ in range(100)) == 5


def test_names_stand_before_ids_and_a_public_page_has_none(tmp_path: Path) -> None:
    status = a_status(name="Ann's laptop")
    named = replace(status.peers[0], name="Bob <3")
    a_peer(tmp_path, name=status.name, peers=(named, *status.peers[1:]))
    text = an_owner(tmp_path).get("/").text.replace("&#39;", "'")
    assert "Ann's laptop (this machine)" in text
    assert f"Bob &lt;3 (..{OTHER[-8:]})" in text
    public = a_site(tmp_path, is_public=True).get("/").text
    assert "Bob" not in public
    assert "Ann" not in public


def test_the_table_shows_since_when_a_machine_is_there(tmp_path: Path) -> None:
    peer = PeerId(bytes(range(32)))
    line = replace(a_status().peers[0], peer=format_peer_id(peer))
    a_peer(tmp_path, peers=(line,))
    folder = run_folder(tmp_path, Digest(bytes.fromhex(RUN)))
    folder.mkdir()
    record = MemberRecord(peer=peer, since=1_764_547_200.0)
    (folder / MEMBERS_FILE).write_bytes(encode_members(Members(updated=0.0, records=(record,))))
    text = an_owner(tmp_path).get("/").text
    assert '<data value="1764547200.0">' in text
    (folder / MEMBERS_FILE).write_bytes(b"{")
    assert an_owner(tmp_path).get("/").status_code == 200


def test_limits_have_the_units_of_the_terminal(tmp_path: Path) -> None:
    a_peer(tmp_path, limits={"max_upload": "1000kbit", "monthly_quota": "180000MB", "hours": "22:00-07:00"})
    text = an_owner(tmp_path).get("/").text
    for limit in ("1 Mbit/s", "180.0 GB", "22:00-07:00"):
        assert f"<dd>{limit}</dd>" in text


def test_hostile_texts_are_shown_as_texts(tmp_path: Path) -> None:
    a_peer(tmp_path, run_name="<script>alert(1)</script>\u202e", trouble='"><img src=x onerror=alert(1)>')
    append_event(tmp_path, PeerEvent(time=time.time(), topic="trust", text="<b>\u202e\x1b[2J"))
    text = an_owner(tmp_path).get("/").text
    assert "&lt;script&gt;alert(1)" in text
    assert not any(piece in text for piece in ("<script>alert", "<img", "<b>", "\u202e", "\x1b"))


def test_a_folder_that_is_missing_or_broken_still_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    for name, content in (
        ("status.json", b"{"),
        ("events.jsonl", b"\xff{\n[]\n{}\n"),
        ("history.sqlite", b"x" * 9_000),
    ):
        (tmp_path / "broken" / name).write_bytes(content)
    site = a_site(tmp_path / "missing", tmp_path / "broken")
    for peer in (0, 1):
        assert "This peer has not yet reached the run." in site.get(f"/?peer={peer}").text
    assert site.get("/metrics").status_code == 200


def test_only_the_end_of_a_long_log_of_events_is_read(tmp_path: Path) -> None:
    a_peer(tmp_path)
    with (tmp_path / "events.jsonl").open("r+b") as file:
        file.truncate(10_000_000_000)  # a hole
    append_event(tmp_path, PeerEvent(time=time.time(), topic="ready", text="ready again"))
    began = time.monotonic()
    assert "ready again" in an_owner(tmp_path).get("/").text
    assert time.monotonic() - began < 5.0


def test_a_page_asks_nothing_of_other_hosts(tmp_path: Path) -> None:
    a_peer(tmp_path)
    site = a_site(tmp_path)
    for path in ("/", "/page.css", "/page.js"):
        assert not re.search(r'(?:src|href|url\()\s*=?\s*["\'(]?(?:https?:)?//', site.get(path).text)
    assert "default-src 'none'" in site.get("/").headers["content-security-policy"]


def test_metrics_are_read_by_prometheus_own_parser(tmp_path: Path) -> None:
    status = a_peer(tmp_path)
    families = {family.name: family for family in text_string_to_metric_families(a_site(tmp_path).get("/metrics").text)}
    assert all(name.startswith("p2p_diloco_") for name in families)
    values = {
        (sample.name, sample.labels.get("purpose") or sample.labels.get("state")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["p2p_diloco_heldout_loss", None] == status.anchor_loss
    assert values["p2p_diloco_tokens_total", None] == status.tokens
    assert values["p2p_diloco_sent_bytes_total", "vectors"] == 3_000_000
    assert values["p2p_diloco_peers", "training"] == values["p2p_diloco_peers", "serving"] == 1
    assert values["p2p_diloco_running", None] == 1
    assert values["p2p_diloco_alarms", None] == 0


def test_several_peers_share_a_page(tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        a_peer(tmp_path / name, run_name=f"run of {name}")
    site = a_site(tmp_path / "ann", tmp_path / "bob")
    assert "<h1><bdi>run of ann" in site.get("/").text
    assert "<h1><bdi>run of bob" in site.get("/?peer=1").text
    assert "<h1><bdi>run of ann" in site.get("/?peer=2").text


def test_a_peer_of_another_version_is_shown_as_far_as_it_is_known(tmp_path: Path) -> None:
    a_peer(tmp_path)
    document = json.loads((tmp_path / "status.json").read_text()) | {"invented_later": [1, {"x": None}]}
    del document["weight"]
    (tmp_path / "status.json").write_text(json.dumps(document))
    assert read_status(tmp_path) is not None
    assert figure(a_site(tmp_path).get("/").text, "round") == "41"
