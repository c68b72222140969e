"""An invite is one line, and whatever is wrong with it is said."""

from __future__ import annotations

import contextlib
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, format_peer_id, sha256
from p2p_diloco.invite import Invite, format_invite, parse_invite, parse_run_id
from p2p_diloco.signing import SigningKey

RUN = sha256(b"run")
NAME = format_peer_id(SigningKey(bytes(32)).peer)
FIRST = f"/ip4/203.0.113.7/tcp/31337/p2p/{NAME}"
SECOND = f"/ip6/2001:db8::1/tcp/31337/p2p/{NAME}"
LINE = f"p2pdiloco://{RUN.hex()}?b={FIRST}&b={SECOND}"
INVITE = Invite(run=RUN, bootstraps=(FIRST, SECOND))


def test_the_line_is_readable_and_reads_back() -> None:
    assert format_invite(INVITE) == LINE
    assert parse_invite(LINE) == INVITE


addresses = st.builds(
    lambda ip, port, secret: f"/ip4/{ip}/tcp/{port}/p2p/{format_peer_id(SigningKey(secret).peer)}",
    st.ip_addresses(v=4),
    st.integers(1, 65535),
    st.binary(min_size=32, max_size=32),
)


@given(st.binary(min_size=32, max_size=32), st.lists(addresses, min_size=1, max_size=4, unique=True))
def test_every_invite_survives_its_line_and_every_shell(run: bytes, bootstraps: list[str]) -> None:
    invite = Invite(run=Digest(run), bootstraps=tuple(bootstraps))
    line = format_invite(invite)
    assert shlex.split(f'join "{line}"') == ["join", line]
    assert parse_invite(line) == invite


@pytest.mark.parametrize("text", [f"  {LINE}\n", f'"{LINE}"', f"'{LINE}'", LINE.replace("p2pdiloco", "P2PDiLoCo")])
def test_what_pasting_adds_does_not_matter(text: str) -> None:
    assert parse_invite(text) == INVITE


def test_percent_signs_of_chat_programs_are_undone() -> None:
    assert parse_invite(LINE.replace("/p2p/", "%2Fp2p%2F")) == INVITE


def test_a_slash_before_the_question_mark_does_not_matter() -> None:
    assert parse_invite(LINE.replace("?", "/?")) == INVITE


def test_an_address_given_twice_counts_once() -> None:
    assert parse_invite(f"p2pdiloco://{RUN.hex()}?b={FIRST}&b={FIRST}").bootstraps == (FIRST,)


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        ("", "'' is not an invite; expected p2pdiloco://<run id>?b=/ip4/"),
        ("hello", "'hello' is not an invite"),
        (LINE.replace("p2pdiloco", "https"), "is not an invite; expected p2pdiloco://"),
        (f"p2pdiloco://?b={FIRST}", "the run id has 0 characters, expected 64 digits"),
        ("p2pdiloco://[", "is not an invite"),
        (f"p2pdiloco://{RUN.hex()[:40]}", "the run id has 40 characters, expected 64 digits; was the line cut off?"),
        (LINE.replace(RUN.hex(), "g" * 64), "the run id holds 'g'; expected hexadecimal digits"),
        (f"p2pdiloco://{RUN.hex()}", "names no bootstrap address; was the line cut off?"),
        (f"p2pdiloco://{RUN.hex()}?b=", "'' is not an address"),
        (f"{LINE}&t=secret", "the invite holds 't', which this version does not know; expected only b="),
        (f"p2pdiloco://{RUN.hex()}/x?b={FIRST}", "holds '/x' after its run id"),
        (f"{LINE}#top", "holds '#top' after its run id"),
        (f"p2p-diloco join {LINE}", "holds a space or a line break; expected one line"),
        (LINE.replace("&", "\n&"), "holds a space or a line break; expected one line"),
        (f"p2pdiloco://{RUN.hex()}?b=/ip4/203.0.113.7/tcp/31337", "does not say which peer is there"),
        (f"{LINE}{'x' * 9000}", "characters; expected at most 8192"),
        (
            f"p2pdiloco://{RUN.hex()}?" + "&".join(f"b={FIRST.replace('31337', str(port))}" for port in range(1, 18)),
            "names 17 bootstrap addresses; expected at most 16",
        ),
    ],
)
def test_what_is_wrong_with_an_invite_is_said(text: str, claim: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_invite(text)
    assert claim in str(caught.value)
    assert len(str(caught.value)) < 400


@given(st.text(max_size=60))
def test_no_text_does_worse_than_a_config_error(text: str) -> None:
    for line in (text, f"p2pdiloco://{text}", f"p2pdiloco://{RUN.hex()}{text}", f"p2pdiloco://{RUN.hex()}?b={text}"):
        with contextlib.suppress(ConfigError):
            parse_invite(line)


def test_a_run_id_is_read_in_either_case() -> None:
    assert parse_run_id(RUN.hex().upper()) == RUN
