"""Choice of addresses to dial, and error texts if that fails."""

from __future__ import annotations

import pytest

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, format_peer_id, sha256
from p2p_diloco.transport.addresses import (
    explain_refusal,
    have_crossed,
    host_of,
    port_in,
    sort_addresses,
    tcp_address,
    without_loopback,
)

PEER = PeerId(sha256(b"peer"))
END = f"/p2p/{format_peer_id(PEER)}"


def test_tcp_addresses_of_the_peer_are_kept_in_order_once() -> None:
    addresses = [
        f"/dns4/example.org/tcp/31337{END}",
        f"/ip4/203.0.113.7/tcp/1{END}",
        f"/ip6/2001:db8::1/tcp/2{END}",
        f"/ip4/203.0.113.7/tcp/1{END}",
    ]
    assert sort_addresses(PEER, addresses) == (
        "/dns4/example.org/tcp/31337",
        "/ip4/203.0.113.7/tcp/1",
        "/ip6/2001:db8::1/tcp/2",
    )


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/203.0.113.7/tcp/1",
        f"/ip4/203.0.113.7/tcp/1/p2p/{format_peer_id(PeerId(sha256(b'other')))}",
        f"/ip4/203.0.113.7/udp/1/quic-v1{END}",
        f"/ip4/203.0.113.777/tcp/1{END}",
        f"/ip4/203.0.113.7/tcp/99999{END}",
        f"/unix/etc/passwd{END}",
        f"garbage{END}",
        "",
    ],
)
def test_other_addresses_are_skipped(address: str) -> None:
    with pytest.raises(PeerError, match="cannot be dialled: none of its 1 addresses is a TCP address"):
        sort_addresses(PEER, [address])


def test_each_address_gets_its_reason() -> None:
    words = (
        "failed to dial: failed to dial 12D3KooW: all dials failed\n"
        "  * [/ip4/127.0.0.1/tcp/9] dial tcp4 127.0.0.1:9: connect: connection refused\n"
        "  * [/ip4/127.0.0.1/tcp/8] failed to negotiate security protocol: peer id mismatch: expected a, but b\n"
        "  * [/ip4/127.0.0.1/tcp/7] dial backoff\n"
        "  * [/ip4/127.0.0.1/tcp/6] dial tcp4 127.0.0.1:6: i/o timeout\n"
        "  * [/ip4/127.0.0.1/tcp/5] dial tcp4 127.0.0.1:5: connect: no route to host\n"
        "  * [/memory] strange"
    )
    assert explain_refusal(words) == (
        "127.0.0.1:9 refused; 127.0.0.1:8 is another peer; 127.0.0.1:7 failed a moment ago; 127.0.0.1:6 timed out; "
        "127.0.0.1:5 no route to host; /memory strange"
    )


def test_a_refusal_without_addresses_is_shown_shortened() -> None:
    assert explain_refusal("dial backoff") == "it failed a moment ago; libp2p waits before it tries again"
    assert explain_refusal("something\n  else") == "something else"
    assert len(explain_refusal("long " * 1000)) == 600


@pytest.mark.parametrize(
    ("words", "crossed"),
    [
        ("failed to dial: * [/ip4/127.0.0.1/tcp/9] failed to negotiate security protocol: message is too short", True),
        ("failed to dial: * [/ip4/127.0.0.1/tcp/9] dial tcp4: connect: connection refused", False),
    ],
)
def test_crossed_dials_are_distinguished_from_refused_ones(words: str, crossed: bool) -> None:
    assert have_crossed(words) is crossed


def test_hosts_and_ports_are_read_from_tcp_addresses_and_never_from_relayed_ones() -> None:
    assert host_of("/ip4/45.10.0.2/tcp/31337") == "45.10.0.2"
    assert host_of("/ip6/2a01:4f8::1/tcp/31337") == "2a01:4f8::1"
    for address in ("/dns4/example.org/tcp/31337", "/ip4/45.10.0.2/tcp/1/p2p/x/p2p-circuit", "/unix/tmp/x"):
        assert host_of(address) is None
    assert port_in("/dns4/example.org/tcp/31337/p2p/x") == 31337
    assert port_in("/memory/1/p2p/x") is None
    assert tcp_address("2a01:4f8::1", 5) == "/ip6/2a01:4f8::1/tcp/5"
    assert tcp_address("45.10.0.2", 5) == "/ip4/45.10.0.2/tcp/5"


def test_loopback_is_kept_only_if_there_is_nothing_else() -> None:
    near, far = ("/ip4/127.0.0.1/tcp/1/p2p/x", "/ip6/::1/tcp/1/p2p/x"), "/ip4/192.168.1.7/tcp/1/p2p/x"
    assert without_loopback((*near, far)) == (far,)
    assert without_loopback(near) == near
