"""The one repair: compare at a closed boundary, fetch what is missing, replay in parent order, compare contents.

It serves the joiner, the straggler and the healed split alike. Requests are dealt over all donors, few at a time each,
entries before spans: on a thin link a joiner must first keep up with what it holds. As long as a donor answers
something it may take its time with the rest; one that does not is left for another.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanHead, SpanId
from p2p_diloco.protocol.actions import Action, ReplaceSpan, Send
from p2p_diloco.protocol.chain import ChainBook, Remedy, choose_remedy
from p2p_diloco.protocol.donors import Donors
from p2p_diloco.protocol.heads_asked import HeadsAsked
from p2p_diloco.protocol.messages import (
    ContentRequest,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    SpanReply,
    SpanRequest,
)
from p2p_diloco.protocol.scrub import Scrub
from p2p_diloco.protocol.transfer import CatchUpRules, Transfer, Want
from p2p_diloco.protocol.window import Asked, Window, least_loaded

Question = HeadsRequest | ContentRequest | EntryRequest | SpanRequest

MOST_ASKED_PER_DONOR = {Want.ENTRY: 8, Want.SPAN: 8}
"""Requests under way at one donor: enough that it never waits for the next one, nor for those that were lost."""
QUIET_SHARE = 0.125
"""Of `piece_seconds`: how long a donor that used to answer may answer nothing while others do."""
WITNESSES = 2
MOST_LACKING = 2
"""Donors that lack the entry we need, after which the whole span is fetched."""


class CatchUp:
    """What one peer fetches, from whom, and what it has verified. A state machine without I/O."""

    def __init__(self, *, rules: CatchUpRules, chains: ChainBook) -> None:
        self.scrub = Scrub(
            num_spans=rules.num_spans, answer_seconds=rules.answer_seconds, pause_seconds=rules.pause_seconds
        )
        self._rules = rules
        self._chains = chains
        self._wanted: dict[SpanId, tuple[Want, PeerId | None]] = {}
        self._asked: dict[SpanId, Asked] = {}
        self._transfers: dict[SpanId, Transfer] = {}
        self._heads_asked = HeadsAsked()
        self._targets: dict[SpanId, tuple[int, PeerId]] = {}
        self._donors = Donors(quiet_seconds=QUIET_SHARE * rules.piece_seconds)
        self._sources: dict[SpanId, PeerId] = {}
        self._first_asked: dict[SpanId, float] = {}
        self._servers: dict[SpanId, set[PeerId]] = {}
        self._windows = {
            Want.ENTRY: Window(seconds=rules.entry_seconds, target_seconds=rules.entry_seconds / 2.0),
            Want.SPAN: Window(seconds=rules.piece_seconds, target_seconds=rules.piece_target_seconds),
        }
        self._head_accusers: dict[SpanId, set[PeerId]] = {}
        self._lacking: dict[SpanId, set[PeerId]] = {}
        self._unadopted: set[int] = set()
        self.is_adopting = False

    # -- what is known to be missing

    def want_everything(self) -> None:
        """Fetch every span that has no head here: a newcomer's first step."""
        missing = self._rules.span_bytes.keys() - self._chains.heads.keys() - self._wanted.keys()
        for span in sorted(missing):
            self._wanted[span] = (Want.SPAN, None)

    def want_entry(self, span: SpanId, donor: PeerId | None) -> None:
        """Fetch the entry that follows this peer's head of `span`."""
        self._wanted.setdefault(span, (Want.ENTRY, donor))

    def has_asked(self, span: SpanId, donor: PeerId) -> bool:
        """Tell whether an answer about `span` is awaited from a donor."""
        asked = self._asked.get(span)
        return asked is not None and asked.donor == donor

    def forget(self) -> None:
        """Fetch nothing of what is wanted now."""
        for dropped in (self._wanted, self._asked, self._transfers, self._targets, self._lacking, self._heads_asked):
            dropped.clear()
        for asked in (self._servers, self._first_asked, self._sources):
            asked.clear()

    def adopt(self) -> None:
        """Give up our branch: what differs from a donor of the other one is fetched, even where our log is longer."""
        self.forget()
        self.scrub.begin_again()
        self._unadopted = set(range(len(self._rules.num_spans)))
        self.is_adopting = True

    def adopted(self, fragment: int) -> None:
        """Hear that a fragment stands where a donor's of the new branch stands."""
        self._unadopted.discard(fragment)

    def is_complete(self) -> bool:
        """Tell whether every span has a head here and none is being fetched."""
        missing = self._wanted or self._unadopted or len(self._chains.heads) < len(self._rules.span_bytes)
        self.is_adopting = self.is_adopting and bool(missing)
        return not missing

    def left_out(self) -> frozenset[SpanId] | None:
        """Return the spans that are being fetched, to which nothing can be contributed; None: to no span can be."""
        lacks_some = self._unadopted or len(self._chains.heads) < len(self._rules.span_bytes)
        return frozenset(self._wanted) if self.is_complete() or not (self.is_adopting or lacks_some) else None

    # -- asking

    def ask_heads(self, fragment: int, donor: PeerId, now: float) -> list[Action]:
        """Ask a peer whose fragment differs from ours where its spans stand, one peer at a time."""
        # Of an entry that is missed by the way nobody has said how far it is from there.
        replayed = (span for span, (want, _) in self._wanted.items() if want is Want.ENTRY and span in self._targets)
        is_replayed = any(span.fragment == fragment for span in replayed)
        if not self._heads_asked.may_ask(fragment, donor, now, is_replayed=is_replayed):
            return []
        self._heads_asked.ask(fragment, donor, now + self._rules.entry_seconds)
        return [self._send(donor, HeadsRequest(fragment=fragment), now)]

    def ask_content(self, fragment: int, donor: PeerId, now: float) -> list[Action]:
        """Ask a peer that stands where we stand for the digests of its bytes, until enough agree."""
        if not self.scrub.may_ask(fragment, donor, now):
            return []
        return [self._send(donor, ContentRequest(fragment=fragment), now)]

    def pump(self, donors: Sequence[PeerId], now: float, sources: Sequence[PeerId] | None = None) -> list[Action]:
        """Send what can be asked now: unanswered requests again, to another donor, and those that wait.

        Args:
            donors: to ask for entries, and for spans that one of them is preferred for.
            sources: to ask for other spans; None: the donors.
        """
        for span in [span for span, (_, ahead) in self._targets.items() if ahead not in donors]:
            del self._targets[span]  # who cannot be asked must not be waited for
        self._donors.look(now)
        everybody = list(dict.fromkeys([*donors, *(sources or ())]))
        actions = self._give_up_on(everybody, now)
        sound, wide = (self._donors.sound(some, now) for some in (donors, donors if sources is None else sources))
        self._take_back_for(wide)
        left = {want: window.size for want, window in self._windows.items()}
        load = {want: dict.fromkeys(everybody, 0) for want in Want}
        for span, asked in self._asked.items():
            want = self._wanted[span][0]
            load[want][asked.donor] = load[want].get(asked.donor, 0) + 1
            left[want] -= 1
        # Entries, from whoever has them: one that is shunned may be the only one ahead.
        for want, able, preferable in ((Want.ENTRY, donors, donors), (Want.SPAN, wide, sound)):
            if all(load[want][donor] >= MOST_ASKED_PER_DONOR[want] for donor in able):
                continue  # while a transfer runs, nearly always
            for span in self._waiting(want):
                free = [donor for donor in able if load[want][donor] < MOST_ASKED_PER_DONOR[want]]
                if not free or left[want] <= 0:
                    break
                donor = self._wanted[span][1]
                if donor is None or donor not in preferable or load[want][donor] >= MOST_ASKED_PER_DONOR[want]:
                    donor = least_loaded(span, free, load[want])
                load[want][donor] += 1
                left[want] -= 1
                actions.append(self._ask(span, want, donor, now))
        return actions

    def _take_back_for(self, sources: Sequence[PeerId]) -> None:
        """Take spans back from donors that were asked when there were no better ones, as many as those can serve."""
        asked_here = sum(asked.donor in sources for asked in self._asked.values())
        spare = MOST_ASKED_PER_DONOR[Want.SPAN] * len(sources) - asked_here
        for span, asked in list(self._asked.items()):
            is_span, is_preferred = self._wanted[span][0] is Want.SPAN, self._wanted[span][1] == asked.donor
            if spare > 0 and is_span and not is_preferred and asked.donor not in sources:
                del self._asked[span]
                spare -= 1

    def _waiting(self, want: Want) -> list[SpanId]:
        """Return what nobody was asked for yet; first the spans of which something has come."""
        waiting = [span for span, (what, _) in self._wanted.items() if what is want and span not in self._asked]
        return sorted(waiting, key=lambda span: span not in self._transfers) if want is Want.SPAN else waiting

    def _ask(self, span: SpanId, want: Want, donor: PeerId, now: float) -> Send:
        window = self._windows[want]
        self._asked[span] = Asked(
            donor=donor,
            until=now + window.seconds,
            last=now + window.longest_seconds,
            at=now,
            piece_bytes=self._donors.piece_bytes(donor),
        )
        self._first_asked.setdefault(span, now)
        if want is Want.SPAN:
            self._servers.setdefault(span, set()).add(donor)
        return self._request(span, want, donor, now)

    def _give_up_on(self, donors: Sequence[PeerId], now: float) -> list[Action]:
        """Take requests back from donors that are too slow, or have stopped; say so of one that stopped serving spans.

        One whose heartbeats do not come through goes on: on a thin line they wait behind its own pieces. A link that is
        lost takes its requests with it, see `lose`.
        """
        actions: list[Action] = []
        for span, asked in list(self._asked.items()):
            want, preferred = self._wanted[span]
            is_late = asked.until <= now
            if not is_late and not (want is Want.SPAN and self._donors.is_quiet(asked.donor, asked.at, donors, now)):
                continue
            del self._asked[span]
            self._wanted[span] = (want, None if preferred == asked.donor else preferred)
            if asked.donor in donors:
                if want is Want.SPAN:
                    what = f"served nothing of {span} for {now - asked.at:.0f} s"
                    actions += self._donors.shun(asked.donor, what, now)
                if is_late:  # one donor that stopped says nothing about the line
                    self._windows[want].unanswered()
        return actions

    def heard(self, donor: PeerId, now: float) -> None:
        """Hear that a donor has answered something: it may take its time with the rest."""
        self._donors.heard(donor, now)
        for span, asked in self._asked.items():
            if asked.donor == donor:
                until = min(now + self._windows[self._wanted[span][0]].seconds, asked.last)
                asked.until = max(until, asked.until)

    def _request(self, span: SpanId, want: Want, donor: PeerId, now: float) -> Send:
        if want is Want.ENTRY:
            return self._send(donor, EntryRequest(span=span, parent=self._chains.heads[span].digest), now)
        transfer = self._transfers.get(span)
        version = transfer.head.digest if transfer is not None else ZERO_DIGEST
        offset = transfer.received_bytes if transfer is not None else 0
        most_bytes = self._donors.piece_bytes(donor)
        request = SpanRequest(span=span, version=version, offset=offset, most_bytes=most_bytes)
        return self._send(donor, request, now)

    def _send(self, to: PeerId, message: Question, now: float) -> Send:
        return Send(to=to, message=message, deadline=now + self._rules.answer_seconds)

    # -- answers

    def take_heads(self, sender: PeerId, reply: HeadsReply) -> bool:
        """Tell whether a reply answers what was asked and fits the run."""
        fits = reply.fragment < len(self._rules.num_spans) and len(reply.heads) == self._rules.num_spans[reply.fragment]
        return fits and self._heads_asked.take(reply.fragment, sender)

    def note_differences(self, sender: PeerId, reply: HeadsReply) -> None:
        """Note for each span of a fragment what the comparison asks for."""
        for index, theirs in enumerate(reply.heads):
            span = SpanId(reply.fragment, index)
            mine = self._chains.heads.get(span)
            remedy = choose_remedy(mine, theirs)
            if mine is not None and mine.digest == theirs.digest and mine != theirs:
                self._accuse_head(span, sender)
            elif remedy is Remedy.REPLAY:
                if theirs.height >= self._targets.get(span, (0, sender))[0]:
                    self._targets[span] = (theirs.height, sender)
                self._wanted.setdefault(span, (Want.ENTRY, sender))
            elif remedy is Remedy.TRANSFER:
                self._wanted[span] = (Want.SPAN, sender)
            elif reply.fragment in self._unadopted and mine is not None and mine.digest != theirs.digest:
                self._chains.drop_head(span)
                self.want_transfer(span, sender)
        self.adopted(reply.fragment)

    def entry_absorbed(self, span: SpanId, now: float) -> None:
        """Go on with the next entry of a replay, or end it."""
        self._lacking.pop(span, None)
        if self._wanted.get(span, (None, None))[0] is not Want.ENTRY:
            return
        self._answered(span, Want.ENTRY, now)
        donor = self._wanted[span][1]
        self._drop(span)
        if self._is_behind(span):
            self._wanted[span] = (Want.ENTRY, donor)

    def _is_behind(self, span: SpanId) -> bool:
        """Tell whether some peer is known to stand higher; forget it once we stand there."""
        head = self._chains.heads.get(span)
        if head is not None and span in self._targets and head.height >= self._targets[span][0]:
            del self._targets[span]
        return head is not None and span in self._targets

    def entry_absent(self, sender: PeerId, span: SpanId, parent: Digest) -> None:
        """Hear that a donor has no entry after our head; if it is ahead of us, our logs cannot be joined: transfer.

        The next comparison raises what another donor lacks again, but not for ever: nobody may have kept it.
        """
        asked = self._asked.get(span)
        head = self._chains.heads.get(span)
        if asked is None or asked.donor != sender or head is None or head.digest != parent:
            return
        self._drop(span)
        if not self._is_behind(span):
            return
        self._heads_asked.forget(span.fragment)  # the next comparison raises it again
        target = self._targets[span][1]
        lacking = self._lacking.setdefault(span, set())
        lacking.add(sender)
        if sender == target or len(lacking) >= MOST_LACKING:
            del self._targets[span]
            self.want_transfer(span, target)

    def want_transfer(self, span: SpanId, donor: PeerId) -> None:
        """Fetch a whole span: its log cannot be joined with the donor's."""
        self._lacking.pop(span, None)
        self._drop(span)
        self._wanted[span] = (Want.SPAN, donor)

    def take_span(self, sender: PeerId, reply: SpanReply, now: float) -> list[Action]:
        """Add a piece; ask for the next one, or hand the whole span over.

        A piece that comes late, when another donor has been asked already, is as good as any if it fits.
        """
        span, asked = reply.span, self._asked.get(reply.span)
        if sender not in self._servers.get(span, ()) or self._wanted.get(span, (None, None))[0] is not Want.SPAN:
            return []
        is_asked = asked is not None and asked.donor == sender
        transfer = self._transfers.get(span)
        is_new = transfer is None or transfer.head.digest != reply.head.digest
        if is_new and (reply.offset or not is_asked):
            return []  # of a version that was given up
        mine, expected = self._chains.heads.get(span), self._rules.span_bytes[span]
        if mine is not None and reply.head.height < mine.height:
            self._drop(span)  # the log does not go back; the next comparison says what is needed
            return []
        received = 0 if transfer is None or is_new else transfer.received_bytes
        behind = reply.offset + len(reply.piece)
        if reply.total_bytes != expected or not reply.piece or reply.offset > received or behind > expected:
            return self._refuse_piece(span, sender, now)
        if transfer is None or is_new:
            transfer = self._transfers[span] = Transfer(reply.head, expected)
        if asked is not None and is_asked:
            del self._asked[span]
            self._donors.answered(sender, asked.piece_bytes, len(reply.piece), now - asked.at)
        if reply.offset == received:
            self._answered(span, Want.SPAN, now)
            transfer.add(reply.piece)
        if transfer.received_bytes == expected:
            return [self._take_whole(span, transfer, sender)]
        return [self._ask(span, Want.SPAN, sender, now)] if is_asked else []

    def _refuse_piece(self, span: SpanId, sender: PeerId, now: float) -> list[Action]:
        for forgotten in (self._transfers, self._asked):
            forgotten.pop(span, None)
        self._wanted[span] = (Want.SPAN, None)
        return self._donors.shun(sender, f"served a piece that does not fit {span}", now)

    def _take_whole(self, span: SpanId, transfer: Transfer, donor: PeerId) -> Action:
        self._drop(span)
        self._has_new_head(span)
        self._sources[span] = donor
        self._chains.set_head(span, transfer.head)
        return ReplaceSpan(span=span, head=transfer.head, state=transfer.state)

    def mend(self, span: SpanId, head: SpanHead, state: bytes) -> Action:
        """Put a span right from the own disk."""
        self._drop(span)
        self._has_new_head(span)
        return ReplaceSpan(span=span, head=head, state=state, is_mended=True)

    def _has_new_head(self, span: SpanId) -> None:
        """Have it compared with all again, whoever was heard before."""
        self.scrub.moved(span)
        self._heads_asked.forget(span.fragment)

    def overrule(self, span: SpanId, now: float) -> list[Action]:
        """Fetch a span again from one of those who hold something else; leave the donor that it came from."""
        source = self._sources.pop(span, None)
        accusers = self.scrub.accusers(span)
        self.want_transfer(span, accusers[0])
        self.scrub.moved(span)
        if source is None or source in accusers:
            return []
        return self._donors.shun(source, f"served {span} with other bytes than others hold", now)

    def _accuse_head(self, span: SpanId, peer: PeerId) -> None:
        """Note that a peer says other things of the same chain digest; two of them have the span fetched again."""
        accusers = self._head_accusers.setdefault(span, set())
        accusers.add(peer)
        if len(accusers) >= WITNESSES:
            del self._head_accusers[span]
            self.want_transfer(span, peer)

    def _answered(self, span: SpanId, want: Want, now: float) -> None:
        """Learn how long an answer took, from the first time that the question was asked."""
        if span in self._first_asked:
            self._windows[want].answered(now - self._first_asked.pop(span))

    def stop_waiting(self) -> None:
        """Forget what was heard of beyond the heads that are here: whoever had it is gone."""
        for span in [span for span in self._wanted if span in self._chains.heads]:
            self._drop(span)
        if len(self._chains.heads) == len(self._rules.span_bytes):
            self._unadopted.clear()

    def lose(self, donor: PeerId) -> None:
        """Forget what a donor was asked: its link is gone."""
        self._donors.lose(donor)
        for span in [span for span, asked in self._asked.items() if asked.donor == donor]:
            del self._asked[span]
            self._first_asked.pop(span, None)

    def _drop(self, span: SpanId) -> None:
        for kept in (self._wanted, self._asked, self._transfers, self._servers, self._first_asked):
            kept.pop(span, None)
