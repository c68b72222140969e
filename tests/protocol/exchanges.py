"""An exchange at ann, with contributions to feed it, and what she sends."""

from __future__ import annotations

from fake_run import PAYLOAD_BYTES, peer_id, run_rules, verify
from made import founding, head_of, membership_of, roster_1, roster_of

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.actions import Action, Send
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.round.exchange import Exchange
from p2p_diloco.protocol.round.round import EncodedSpan, FragmentContribution, contribution_messages
from p2p_diloco.protocol.wire.messages import Opening, Refusal, SpanVector

ANN, BOB = peer_id("ann"), peer_id("bob")
SPANS = tuple(SpanId(0, index) for index in range(3))
HEAD = head_of()


def exchange(num_members: int = 1, *, with_roster: bool = True, trains: bool = True) -> tuple[Exchange, ChainBook]:
    rules = run_rules()
    rosters = (founding(), roster_1(num_members)) if with_roster else ()
    chains = ChainBook(rules=rules, retained_cycles=16, verify=verify)
    for span in SPANS:
        chains.set_head(span, HEAD)
    return Exchange(rules=rules, membership=membership_of(ANN, *rosters, trains=trains), chains=chains), chains


def contribution(round_index: int = 0, spans: tuple[SpanId, ...] = SPANS) -> FragmentContribution:
    encoded = tuple(EncodedSpan(span=s, parent=HEAD.digest, norm=1.0, payload=bytes(PAYLOAD_BYTES)) for s in spans)
    return FragmentContribution(round=round_index, fragment=0, tokens=10, steps=1, spans=encoded)


def words(given: FragmentContribution, num_members: int = 2) -> tuple[Opening, tuple[SpanVector, ...]]:
    return contribution_messages(given, given.spans, roster_of(num_members).digest(), 1)


def owned(rounds: Exchange) -> tuple[SpanId, ...]:
    assert rounds.collection is not None
    return rounds.collection.reduced


def refusals(actions: list[Action]) -> list[str]:
    return [a.message.reason.decode() for a in actions if isinstance(a, Send) and isinstance(a.message, Refusal)]


def feed(rounds: Exchange, sender: PeerId, given: FragmentContribution, now: float) -> list[Action]:
    opening, vectors = words(given)
    actions = rounds.take(sender, opening, now)
    for vector in vectors:
        actions += rounds.take(sender, vector, now)
    return actions


def sent_openings(actions: list[Action]) -> dict[PeerId, Opening]:
    return {a.to: a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Opening)}
