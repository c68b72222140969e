"""An invite is one line, and errors in it are reported."""

from __future__ import annotations

import contextlib
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.config.invite import (
    MOST_NAMED,
    MOST_PRINTED_CHARACTERS,
    Invite,
    format_invite,
    fresh_invite,
    parse_invite,
    parse_run_id,
)
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, format_peer_id, sha256
from p2p_diloco.protocol.wire.messages import PROTOCOL_VERSION
from p2p_diloco.signing import SigningKey

RUN = sha256(b"run")
NAME = format_peer_id(SigningKey(bytes(32)).peer)
ROSTER = sha256(b"roster")
FIRST = f"/ip4/203.0.113.7/tcp/31337/p2p/{NAME}"
SECOND = f"/ip6/2001:db8::1/tcp/31337/p2p/{NAME}"
VERSION = PROTOCOL_VERSION
LINE = f"p2pdiloco://{RUN.hex()}?v={VERSION}&b={FIRST}&b={SECOND}"
INVITE = Invite(run=RUN, bootstraps=(FIRST, SECOND))


def test_the_line_is_readable_and_parses_back() -> None:
    assert format_invite(INVITE) == LINE
    assert parse_invite(LINE) == INVITE


addresses = st.builds(
    lambda ip, port, secret: f"/ip4/{ip}/tcp/{port}/p2p/{format_peer_id(SigningKey(secret).peer)}",
    st.ip_addresses(v=4),
    st.integers(1, 65535),
    st.binary(min_size=32, max_size=32),
)


@given(st.binary(min_size=32, max_size=32), st.lists(addresses, min_size=1, max_size=4, unique=True))
def test_every_invite_survives_its_line_and_the_shell(run: bytes, bootstraps: list[str]) -> None:
    invite = Invite(run=Digest(run), bootstraps=tuple(bootstraps))
    line = format_invite(invite)
    assert shlex.split(f'join "{line}"') == ["join", line]
    assert parse_invite(line) == invite


@pytest.mark.parametrize(
    "text",
    [
        f"  {LINE}\n",
        f'"{LINE}"',
        f"'{LINE}'",
        f"\u201c{LINE}\u201d.",
        f"({LINE}),",
        f"<{LINE}>",
        LINE.replace("p2pdiloco", "P2PDiLoCo"),
        LINE.replace("&", "&amp;"),
        LINE.replace("&", "&amp;amp;"),
        LINE.replace("&", "%26amp;"),
        LINE.replace("&", "%26"),
        LINE.replace("&", "\n&"),
        LINE.replace("/p2p/", "/p2p/\r\n  "),
        LINE.replace("/tcp/", "\u200b/tcp/"),
        f"{LINE}&",
        f'p2p-diloco join "{LINE}"',
    ],
)
def test_additions_by_pasting_do_not_matter(text: str) -> None:
    assert parse_invite(text) == INVITE


def test_percent_encoding_by_chat_programs_is_undone() -> None:
    assert parse_invite(LINE.replace("/p2p/", "%2Fp2p%2F")) == INVITE


def test_a_slash_before_the_question_mark_does_not_matter() -> None:
    assert parse_invite(LINE.replace("?", "/?")) == INVITE


def test_an_invite_without_a_version_is_accepted() -> None:
    assert parse_invite(LINE.replace(f"v={VERSION}&", "")) == INVITE


def test_a_repeated_address_counts_once() -> None:
    assert parse_invite(f"p2pdiloco://{RUN.hex()}?b={FIRST}&b={FIRST}").bootstraps == (FIRST,)


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        ("", "'' is not an invite; expected p2pdiloco://<run id>?b=/ip4/"),
        ("hello", "'hello' is not an invite"),
        (LINE.replace("p2pdiloco", "https"), "is not an invite; expected p2pdiloco://"),
        (f"p2pdiloco://?b={FIRST}", "the run id has 0 characters, expected 64 digits"),
        ("p2pdiloco://[x", "is not an invite"),
        (f"p2pdiloco://{RUN.hex()[:40]}", "the run id has 40 characters, expected 64 digits; was the line cut off?"),
        (LINE.replace(RUN.hex(), "g" * 64), "the run id contains 'g'; expected only hexadecimal digits"),
        (f"p2pdiloco://{RUN.hex()}", "cut off, or pasted without its double quotes?"),
        (f"p2pdiloco://…?b={FIRST}", "the run id has 1 character, expected 64 digits"),
        (f"p2pdiloco://{RUN.hex()}?b={FIRST[:-3]}", "/tcp/31337/p2p/12D3KooW…; was the line cut off?"),
        (f"p2pdiloco://{RUN.hex()}?b=", "'' is not an address"),
        (f"{LINE}&t=secret", "the invite has 't', which this version does not know; expected v="),
        (f"p2pdiloco://{RUN.hex()}/x?b={FIRST}", "has '/x' after its run id"),
        (f"{LINE}#top", "has '#top' after its run id"),
        (f"p2pdiloco://{RUN.hex()}?b=/ip4/203.0.113.7/tcp/31337", "has no peer id"),
        (
            LINE.replace(f"v={VERSION}", f"v={VERSION + 1}"),
            f"but this program uses {VERSION}; update p2p_diloco here",
        ),
        (LINE.replace(f"v={VERSION}", "v=1"), "the peers of this run must update p2p_diloco, or use theirs"),
        (LINE.replace(f"v={VERSION}", "v=new"), f"version 'new', but this program uses {VERSION}"),
        (f"{LINE}{'x' * 9000}", "characters; expected at most 8192"),
        (
            f"p2pdiloco://{RUN.hex()}?" + "&".join(f"b={FIRST.replace('31337', str(port))}" for port in range(1, 18)),
            "names 17 bootstrap addresses; expected at most 16",
        ),
    ],
)
def test_an_invalid_invite_is_refused_with_the_reason(text: str, claim: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_invite(text)
    assert claim in str(caught.value)
    assert len(str(caught.value)) < 400


def test_an_invite_may_name_the_newest_roster_known_to_its_printer() -> None:
    invite = Invite(run=RUN, bootstraps=(FIRST,), roster=ROSTER)
    assert format_invite(invite) == f"p2pdiloco://{RUN.hex()}?v={VERSION}&r={ROSTER.hex()}&b={FIRST}"
    assert parse_invite(format_invite(invite)) == invite


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (f"b={SECOND[:-3]}", "ignoring a part of the invite: "),
        ("b=/ip4/203.0.113.7/tcp", "cannot be read"),
        (f"b=/ip4/203.0.113.7/udp/9/p2p/{NAME}", "only TCP is supported"),
        ("b=%1b[31mred", r"'\x1b[31mred' is not an address"),
        ("r=abc", "the roster digest has 3 characters, expected 64 digits"),
    ],
)
def test_a_broken_part_among_good_addresses_is_ignored_with_a_complaint(part: str, complaint: str) -> None:
    invite = parse_invite(f"p2pdiloco://{RUN.hex()}?b={FIRST}&{part}")
    assert (invite.bootstraps, invite.roster) == ((FIRST,), None)
    (told,) = invite.complaints
    assert complaint in told
    assert told.isprintable()


def test_whole_addresses_before_a_cut_still_lead_to_the_run() -> None:
    invite = Invite(run=RUN, bootstraps=(FIRST, FIRST.replace("31337", "31338"), SECOND), roster=ROSTER)
    line = format_invite(invite)
    for length in range(line.index(f"b={SECOND}"), len(line)):
        cut = parse_invite(line[:length])
        assert cut.bootstraps == invite.bootstraps[:2]


def test_five_hundred_addresses_are_refused() -> None:
    crowd = "&".join(f"b={FIRST.replace('31337', str(port))}" for port in range(1, 501))
    with pytest.raises(ConfigError, match="characters; expected at most 8192"):
        parse_invite(f"p2pdiloco://{RUN.hex()}?{crowd}")


def member(number: int, *hosts: str) -> tuple[str, ...]:
    name = format_peer_id(SigningKey(sha256(bytes([number]))).peer)
    return tuple(f"/{host}/tcp/31337/p2p/{name}" for host in hosts or (f"ip4/203.0.113.{number}",))


def test_a_fresh_invite_names_each_peer_once_before_any_twice() -> None:
    ada, ben, cleo = (
        member(1, "ip4/10.0.0.1", "ip4/172.17.0.1"),
        member(2),
        member(3, "ip4/10.0.0.3", "ip6/2001:db8::3"),
    )
    invite = fresh_invite(RUN, [ada, ben, cleo], ROSTER)
    assert invite == Invite(run=RUN, bootstraps=(ada[0], ben[0], cleo[0], ada[1], cleo[1]), roster=ROSTER)


def test_invalid_addresses_are_left_out_of_a_fresh_invite() -> None:
    strange = (
        "/ip4/203.0.113.9/tcp/1\x1b[31m",
        f"/ip4/203.0.113.9/udp/1/p2p/{NAME}",
        "x" * 9999,
        f"{FIRST}&b=/",
        FIRST,
    )
    assert fresh_invite(RUN, [strange]).bootstraps == (FIRST,)
    assert fresh_invite(RUN, [strange[:4]]).bootstraps == ()


def test_a_fresh_invite_stays_short_enough_to_paste() -> None:
    crowd = [member(number) for number in range(200)]
    invite = fresh_invite(RUN, crowd, ROSTER)
    assert invite.bootstraps == tuple(addresses[0] for addresses in crowd[:MOST_NAMED])
    assert len(f'p2p-diloco join "{format_invite(invite)}"') < 1_500
    long = fresh_invite(RUN, [member(number, f"dns4/{'a' * 60}.{'b' * 60}.org") for number in range(200)], ROSTER)
    assert 2 <= len(long.bootstraps) < MOST_NAMED
    assert len(format_invite(long)) <= MOST_PRINTED_CHARACTERS


@given(st.text(max_size=60))
def test_any_text_parses_or_raises_config_error(text: str) -> None:
    for line in (text, f"p2pdiloco://{text}", f"p2pdiloco://{RUN.hex()}{text}", f"p2pdiloco://{RUN.hex()}?b={text}"):
        with contextlib.suppress(ConfigError):
            parse_invite(line)


def test_a_run_id_is_parsed_in_either_case() -> None:
    assert parse_run_id(RUN.hex().upper()) == RUN
