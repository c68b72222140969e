"""Addresses that users type are checked before anything is dialled or bound."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.config.invite import MAX_ADDRESS_CHARACTERS, parse_host_address, parse_peer_address
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import format_peer_id
from p2p_diloco.signing import SigningKey

PEER = SigningKey(bytes(32)).peer
NAME = format_peer_id(PEER)


@pytest.mark.parametrize(
    "host", ["/ip4/203.0.113.7/tcp/31337", "/ip6/2001:db8::1/tcp/1", "/dns4/bootstrap.example.org/tcp/65535"]
)
def test_a_peer_address_names_host_port_and_peer(host: str) -> None:
    assert parse_peer_address(f"{host}/p2p/{NAME}") == (f"{host}/p2p/{NAME}", PEER)
    assert parse_host_address(host) == host


def test_port_0_is_for_listening_only() -> None:
    assert parse_host_address("/ip4/127.0.0.1/tcp/0") == "/ip4/127.0.0.1/tcp/0"
    with pytest.raises(ConfigError, match="port 0, which cannot be dialled"):
        parse_peer_address(f"/ip4/127.0.0.1/tcp/0/p2p/{NAME}")


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        ("/ip4/203.0.113.7/tcp/31337", "has no peer id"),
        (f"/ip4/203.0.113.7/tcp/31337/ws/p2p/{NAME}", "has 4 parts; expected three"),
        (f"/ip4/203.0.113.7/tcp/1/p2p/{NAME}/p2p-circuit", "has 4 parts; expected three"),
        (f"/ip4/203.0.113.7/udp/31337/quic-v1/p2p/{NAME}", "only TCP is supported"),
        (f"/p2p/{NAME}", "only TCP is supported"),
        ("/ip4/203.0.113.7/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "not the id of an Ed25519 peer"),
        ("/ip4/203.0.113.7/tcp/1/p2p/xx", "cannot be read: Invalid CID: xx; expected one such as /ip4/"),
        (f"/ip4/203.0.113/tcp/1/p2p/{NAME}", "base address '203.0.113' is not IPv4; expected one such as"),
        (f"/ip4/203.0.113.7/tcp/99999/p2p/{NAME}", "integer not in range"),
        ("/ip4/203.0.113.7/tcp", "missing value for protocol: tcp"),
        ("203.0.113.7:31337", "is not an address; expected one such as /ip4/203.0.113.7/tcp/31337"),
        ("", "is not an address"),
        ("/ip4/203.0.113.7/tcp/1\n", "is not an address"),
        ("/ip4/203.0.113.7 /tcp/1", "is not an address"),
        ("/" * (MAX_ADDRESS_CHARACTERS + 1), "has 513 characters; expected at most 512"),
    ],
)
def test_an_invalid_peer_address_is_refused_with_the_reason(text: str, claim: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_peer_address(text)
    assert claim in str(caught.value)


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{NAME}", "leave out /p2p/…, because the peer id is known"),
        ("/ip4/203.0.113.7/tcp/31337/ws", "/ws is not supported"),
        ("/ip4/203.0.113.7/udp/31337", "is of kind /ip4/udp; only TCP is supported"),
        ("/unix/socket", "is of kind /unix; only TCP is supported"),
    ],
)
def test_an_invalid_host_address_is_refused_with_the_reason(text: str, claim: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_host_address(text)
    assert claim in str(caught.value)


@given(st.text(alphabet=st.sampled_from("/ip46tcpdns0123456789.:pQm%é "), max_size=40).map(lambda text: f"/{text}"))
def test_any_text_parses_or_raises_config_error(text: str) -> None:
    for parse in (parse_host_address, parse_peer_address):
        with contextlib.suppress(ConfigError):
            parse(text)
