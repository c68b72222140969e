"""The redaction of a report removes what identifies people and machines, whatever is around it."""

from __future__ import annotations

import json
import re
import time

import pytest

from p2p_diloco.app.cli.redaction import Redactor, names_in
from p2p_diloco.ids import PeerId, format_peer_id, short_peer_id

PEER, OTHER = PeerId(bytes(range(32))), PeerId(bytes(range(1, 33)))
ID, SHORT = format_peer_id(PEER), short_peer_id(PEER)
TAIL = ID[-8:]
INVITE = f"p2pdiloco://{'ab' * 32}?v=10&b=/ip4/203.0.113.7/tcp/31337/p2p/{ID}"


@pytest.fixture
def redactor() -> Redactor:
    made = Redactor()
    made.learn_peers(f"{ID} {format_peer_id(OTHER)}")
    made.learn("user", "alice")
    made.learn("user", "Zoë Müller")
    made.learn("machine", "tower.home.example", "tower")
    made.learn("run", "night owls")
    made.learn("path", "/srv/p2p state")
    return made


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"({ID}),", "(peer-1),"),
        (f"peer{ID}left", "peerpeer-1left"),
        (f"{SHORT}: late", "peer-1: late"),
        (f"[..{TAIL}]", "[peer-1]"),
        (f"{ID[:10]}…{TAIL}!", "peer-1!"),
        (f"..{TAIL}and", "peer-1and"),
        (f"{format_peer_id(OTHER)} beside {SHORT}", "peer-2 beside peer-1"),
        ("12D3..9fQ4abcd, ..x7Yz9fQ4", "peer-3, peer-4"),
        (f"12D3..{TAIL[-4:]} of before", "peer-1 of before"),
        ("Qm" + "Y" * 44, "peer-3"),
        ("at [2001:db8::7]:31337.", "at [address-1]:31337."),
        ("2001:db8::7: refused", "address-1: refused"),
        ("2001:db8:0:0:0:0:0:7, 2001:DB8::7", "address-1, address-1"),
        ("fe80::1%eth0 and ::ffff:192.168.1.5", "address-1 and address-2"),
        ("203.0.113.7:31337 timed out", "address-1:31337 timed out"),
        ("a:203.0.113.7", "a:address-1"),
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{ID}", "/ip4/address-1/tcp/31337/p2p/peer-1"),
        (f"/dns4/box/udp/4001/quic-v1/p2p/{ID}", "/dns4/address-1/udp/4001/quic-v1/p2p/peer-1"),
        ("/dnsaddr/swarm.example.org/p2p/x", "/dnsaddr/address-1/p2p/x"),
        ("/ip6/2001:db8::7/tcp/1", "/ip6/address-1/tcp/1"),
        ("bootstrap.example.org:31337, MyBox:31337", "address-1:31337, address-2:31337"),
        ("münchen.example.de.", "address-1."),
        ("https://alice@example.org/x?y=1", "address-1"),
        ("ask zoe@example.org", "ask user-1"),
        ("mac 00:1a:2b:3c:4d:5e", "mac address-1"),
        (f'join "{INVITE}"', 'join "invite-1"'),
        (json.dumps(json.dumps({"invite": INVITE})), '"{\\"invite\\": \\"invite-1\\"}"'),
        ("P2PDILOCO%3A%2F%2Fabab%3Fb=1 pasted", "invite-1 pasted"),
        (r"C:\Users\alice\run.toml is gone", "path-1 is gone"),
        (r"'C:\My Files\alice\x' is gone", "'path-1' is gone"),
        ("'/home/alice/My Model/x' cannot be read", "'path-1' cannot be read"),
        ("cannot write /home/alice/state: full", "cannot write path-1: full"),
        ("file:///srv/texts/tale.txt, ~/tale.txt", "path-1, path-2"),
        (r"wrote C:\Users\Al Smith\x.txt today", "wrote path-1 today"),
        ("/home/zed/My Files/x.txt, 5 kB/s", "path-1, 5 kB/s"),
        ("scp alice@nas:/srv/x", "scp user-1:path-1"),
        ("/srv/p2p state/events.jsonl", "path-1/events.jsonl"),
        ("/srv/p2p state, /srv/p2p state/mine/a.txt", "path-1, path-2"),
        (r"\\server\share\alice", "path-1"),
        ("then alice's machine left", "then user-1's machine left"),
        ("ALICE_backup, alice-laptop", "user-1_backup, user-1-laptop"),
        ("round of night owls, by Zoe\u0308 mu\u0308ller", "round of run-1, by user-1"),
        ("tower and tower.home.example", "machine-1 and machine-1"),
        ("token=hf_" + "aB3" * 12, "token=secret-1"),
        ("key=" + "aB3/" * 10 + "==", "key=secret-1"),
        ("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----", "secret-1"),
    ],
)
def test_what_identifies_somebody_is_replaced(redactor: Redactor, text: str, expected: str) -> None:
    assert redactor.text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "round 22: 3 of 3 spans got an entry",
        "with 3 trainers about 749.3 kB each way every 2.0 s, 32.4 GB a day each way; limit this with --max-upload",
        "held-out loss 1.7913 (shared model), 1.9172 (own model)",
        "at 10:20:30 hivemind 1.1.12 and torch.cuda.OutOfMemoryError",
        "data.path in run.toml; see events.jsonl",
        "sent 4/5 spans and/or none; waiting...",
    ],
)
def test_plain_events_stay_as_they_are(redactor: Redactor, text: str) -> None:
    assert redactor.text(text) == text


def test_digests_are_equal_where_they_were_equal_in_the_reports_of_all_machines(redactor: Redactor) -> None:
    digest = "0123456789abcdef" * 4
    replaced = redactor.text(f"state {digest}")
    assert re.fullmatch(r"state digest-[0-9a-f]{8}", replaced)
    assert Redactor().text(f"state {digest.upper()}") == replaced


def test_a_document_keeps_its_keys_and_numbers(redactor: Redactor) -> None:
    document = {"round": 7, "peers": [{"peer": ID, "loss": None}], "alice": 1, f"of {ID}": "alice"}
    expected = {"round": 7, "peers": [{"peer": "peer-1", "loss": None}], "user-1": 1, "of peer-1": "user-1"}
    assert redactor.document(document) == expected


def test_names_are_found_anywhere_in_a_document() -> None:
    assert names_in({"run_name": "Tales", "peers": [{"name": "bob"}, {"name": 3}]}) == ["Tales", "bob"]


def test_the_kind_of_an_address_may_be_told(redactor: Redactor) -> None:
    redactor.text("8.8.8.8, 192.168.1.2, 100.64.0.1, 127.0.0.1, fe80::1, example.org")
    kinds = ["IPv4, public", "IPv4, private", "IPv4, shared by a provider (CGNAT) or a VPN", "IPv4, this machine"]
    expected = [*kinds, "IPv6, link-local", "name"]
    assert list(redactor.kinds.values()) == expected


@pytest.mark.parametrize(
    "piece", ["a.", "a:", "1:", "/a", "aB3", "..", "1.", "x@", "'/", "p2pdiloco://", "-----BEGIN "]
)
def test_hostile_repetition_takes_no_long_time(redactor: Redactor, piece: str) -> None:
    began = time.process_time()
    redactor.text(piece * 20_000)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("kind", "name", "text", "expected"),
    [
        ("machine", "raspi", "/dns4/raspi.smithfamily.net/tcp/1", "/dns4/address-1/tcp/1"),
        ("user", "jane", "jane.duckdns.org:31337 refused; jane.", "address-1:31337 refused; user-1."),
        ("member", "12D3KooW", f"{ID} left, 12D3KooW too", "peer-1 left, member-1 too"),
        ("member", "203.0", "203.0.113.7 and 203.0", "address-1 and member-1"),
        ("member", "2001", "2001:db8:1:2:3:4:5:6", "address-1"),
        ("member", "/home/", "cannot read /home/jane/peer/x", "cannot read path-1"),
    ],
)
def test_a_name_that_somebody_chose_reveals_nothing_of_what_begins_like_it(
    kind: str, name: str, text: str, expected: str
) -> None:
    redactor = Redactor()
    redactor.learn(kind, name)
    assert redactor.text(text) == expected
