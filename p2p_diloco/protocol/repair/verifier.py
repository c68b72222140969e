"""Judges spans: those that were fetched, and those in memory.

One that was fetched is accepted only with the tip, and with the bytes, that a majority named. Until then it waits
beside the state and blocks nothing. One in memory that differs from others' is checked against this peer's disk first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from p2p_diloco.ids import PeerId, SpanId, short_peer_id
from p2p_diloco.protocol.actions import Action, RebuildSpan, ReplaceSpan, Report
from p2p_diloco.protocol.repair.differences import Differences
from p2p_diloco.protocol.repair.fetcher import Fetcher, Transfer
from p2p_diloco.protocol.repair.quorum import is_start
from p2p_diloco.protocol.repair.reports import Reports
from p2p_diloco.protocol.repair.scrub import Scrub
from p2p_diloco.protocol.repair.signed_content import IndirectVoters
from p2p_diloco.protocol.results import ContentCompared, SpanHashed, SpanRebuilt
from p2p_diloco.protocol.wire.messages import ContentReply, ContentRequest, SignedContent
from p2p_diloco.span_log import SpanHead


class Verifier:
    """Asks others for digests, and accepts, refuses or replaces spans by them. A state machine without I/O."""

    def __init__(
        self,
        *,
        me: PeerId,
        reports: Reports,
        indirect: IndirectVoters,
        fetcher: Fetcher,
        differences: Differences,
        scrub: Scrub,
    ) -> None:
        self._me = me
        self._rules = reports.rules
        self._chains = reports.chains
        self._quorums = reports.quorums
        self._contents = reports.contents
        self._indirect = indirect
        self._fetcher = fetcher
        self._differences = differences
        self._scrub = scrub

    @property
    def is_unsure(self) -> bool:
        """Return whether a span that arrives has not been named by a majority of the electorate."""
        return any(not transfer.is_sure for transfer in self._fetcher.transfers.values())

    @property
    def is_waiting_for_a_majority(self) -> bool:
        """Return whether a whole span has arrived whose bytes have not been named yet."""
        return any(transfer.is_whole and transfer.named is None for transfer in self._fetcher.transfers.values())

    # -- questions and answers

    def ask_names(self, now: float) -> list[Action]:
        """Ask all witnesses for digests of spans that arrive, or cannot be joined, until a majority names each."""
        if not self._fetcher.transfers and not self._differences.is_parted:
            if self._differences.is_complete():  # else keep answers about other spans for the next transfer
                self._contents.clear()
            return []
        actions = [action for span in self._fetcher.transfers for action in self._settle(span, now)]
        transfers = self._fetcher.transfers.items()
        fragments = {span.fragment for span, transfer in transfers if not transfer.is_sure}
        fragments |= self._differences.parted_fragments()
        for fragment in sorted(fragments):
            for peer in self._quorums.contents.askable:
                if self._contents.may_ask(fragment, peer, now):
                    actions.append(self._rules.send(peer, ContentRequest(fragment=fragment), now))
        return actions + self.ask_indirect(sorted(fragments), now)

    def ask_indirect(self, fragments: Iterable[int], now: float) -> list[Action]:
        """Ask unlinked voters for their digests, through other peers."""
        quorum = self._quorums.contents
        questions = self._indirect.ask(fragments, sorted(quorum.indirect), quorum.relays, now)
        return [self._rules.send(relay, question, now) for relay, question in questions]

    def take_content(self, sender: PeerId, reply: ContentReply, now: float) -> list[Action]:
        """Note a peer's digests of spans that are being fetched."""
        return self.settle_fragment(reply.fragment, now) if self._contents.take(sender, reply) else []

    def take_signed(self, answer: SignedContent, now: float) -> None:
        """Note the digests of an unlinked voter, which are expected and signed. Call `settle_fragment` afterwards."""
        asked_at = self._indirect.take(answer, now)
        self._contents.note(answer.voter, answer.fragment, answer.digests, asked_at)

    def hashed(self, result: SpanHashed, now: float) -> list[Action]:
        """Take the content digest of a whole span."""
        transfer = self._fetcher.transfers.get(result.span)
        if transfer is None or transfer.head != result.head or not transfer.is_whole:
            return []
        transfer.hashed(result.content)
        return self._settle(result.span, now)

    # -- judging

    def settle_fragment(self, fragment: int, now: float) -> list[Action]:
        """Check whether spans of a fragment that are being fetched have been named."""
        spans = [span for span in self._fetcher.transfers if span.fragment == fragment]
        return [action for span in spans for action in self._settle(span, now)]

    def _settle(self, span: SpanId, now: float) -> list[Action]:
        """Hand over a span that has the named content, refuse one that has not, and give up an outdated version."""
        fetch = self._fetcher.wanted[span]
        transfer = fetch.transfer
        assert transfer is not None, "only what arrives is settled"
        if not transfer.is_sure:
            self._look_for_names(span, transfer)
        if transfer.named is None:
            self._follow_elsewhere(span, transfer, now)
            return []
        head = transfer.head
        if transfer.content is None or self._fetcher.drop_older(span, head, is_sure=transfer.is_sure):
            return []
        if transfer.content != transfer.named:
            return self._refuse(span, transfer, now)
        actions: list[Action] = []
        is_adoption, mine = fetch.may_go_back, self._chains.heads.get(span)
        if mine is not None and head.height < mine.height and not is_adoption:
            is_adoption = True
            text = (
                f"{span} goes back from height {mine.height} to {head.height}, where a majority has named the right "
                "bytes; the entries since then follow again"
            )
            actions.append(Report(topic="adoption", text=text))
        self._fetcher.drop(span)
        self._differences.transferred(span)
        self._chains.set_head(span, head)
        return [*actions, ReplaceSpan(span=span, head=head, state=transfer.state, is_adoption=is_adoption)]

    def _look_for_names(self, span: SpanId, transfer: Transfer) -> None:
        """Find the bytes that have been named. Those named by more than half of the electorate are final."""
        quorums, trusted = self._quorums, self._trusted(span)
        transfer.name(None, is_sure=False)
        for (chain, content), peers in sorted(self._contents.groups(span).items()):
            are_enough = quorums.contents.may_name(transfer.head, peers) or trusted in peers
            are_enough = are_enough or (span in self._scrub.damaged and quorums.tips.are_most(peers))
            if are_enough and chain == transfer.head.digest and not transfer.is_sure:
                transfer.name(content, is_sure=quorums.contents.are_enough(peers) and not quorums.contents.is_few)

    def _trusted(self, span: SpanId) -> PeerId | None:
        """Return the one peer whose answer is enough for a span that is being fetched; None if a majority is needed.

        A peer that fetches a span has given up its own bytes. If there is only one other member, there is no majority.
        """
        quorum, trusted = self._quorums.contents, self._fetcher.wanted[span].trusted
        return quorum.only if quorum.is_strict or trusted is None else trusted

    def _follow_elsewhere(self, span: SpanId, transfer: Transfer, now: float) -> None:
        """Fetch the version of the majority, or trusted peer, that is at another tip: it will not name this one.

        The donor may have lied, or may have been asked just before it moved on, so it is not avoided.
        """
        quorum, trusted, chain = self._quorums.contents, self._trusted(span), transfer.head.digest
        latest = self._contents.latest(span, since=transfer.began)
        may_have_start = quorum.founder_holds and quorum.founder not in latest  # else it has moved on
        waits_for_founder = is_start(transfer.head) and may_have_start
        if waits_for_founder or now - transfer.began < 2 * self._rules.entry_seconds:
            return
        groups = self._contents.groups(span, since=transfer.began)
        elsewhere = (sorted(peers) for (other, _), peers in groups.items() if other != chain)
        others = next((peers for peers in elsewhere if quorum.are_enough(peers)), [])
        if not others and trusted in latest and latest[trusted][0] != chain:
            others = [trusted]
        if others and others[0] == trusted:
            self._differences.yield_to(span, others[0])
        elif others:
            self._fetcher.want_span(span, others[0])

    def _refuse(self, span: SpanId, transfer: Transfer, now: float) -> list[Action]:
        """Report donors that served other bytes than a majority holds, and ask others.

        If a donor had itself named the right bytes, its memory may have been repaired since, so all are asked again.
        """
        latest = self._contents.latest(span)
        if any(latest[donor][1] == transfer.named for donor in transfer.donors & latest.keys()):
            self._contents.forget(span.fragment)
        return self._fetcher.refuse_transfer(span, now)

    # -- memory

    def ask_content(self, fragment: int, donor: PeerId, now: float) -> list[Action]:
        """Ask a peer at our tips for the digests of its bytes, until enough peers agree."""
        may_ask = self._scrub.may_ask(fragment, donor, now)
        return [self._rules.send(donor, ContentRequest(fragment=fragment), now)] if may_ask else []

    def compared(self, result: ContentCompared, now: float) -> list[Action]:
        """Take the result of a comparison. Ignore spans that are being fetched: a new fetch would start over."""
        peer, quorum = result.peer, self._quorums.contents
        differing = [span for span in result.differing if not self._fetcher.is_transferred(span)]
        rebuild, overruled = self._scrub.compared(peer, result.fragment, result.num_equal, differing, now, quorum)
        actions: list[Action] = []
        for span in rebuild:
            text = f"{span} differs from what {short_peer_id(peer)} holds; checking it against this disk"
            actions += [Report(topic="content", text=text), RebuildSpan(span=span)]
        return actions + [self._overrule(span) for span in overruled]

    def damage(self, span: SpanId, reason: str) -> list[Action]:
        """Rebuild a span whose replica could not follow a valid entry. It stays unchanged until it is replaced."""
        self._scrub.damage(span, is_disk_asked=True)
        text = f"{span} could not follow an entry: {reason}; its memory is damaged, rebuilding it from this disk"
        return [Report(topic="content", text=text), RebuildSpan(span=span)]

    def retry_damaged(self) -> list[Action]:
        """Return requests to rebuild damaged spans that could not be replaced so far. Call in each round."""
        waiting = [span for span, is_asked in self._scrub.damaged.items() if not is_asked]
        waiting = [span for span in waiting if not self._fetcher.is_transferred(span)]
        for span in waiting:
            self._scrub.damage(span, is_disk_asked=True)
        return [RebuildSpan(span=span) for span in waiting]

    def rebuilt(self, result: SpanRebuilt, donors: Sequence[PeerId], now: float) -> list[Action]:
        """Take a span that was rebuilt from this peer's disk; if that failed, fetch it from one of `donors`."""
        span, head, state = result.span, result.head, result.state
        mine, is_damaged = self._chains.heads.get(span), span in self._scrub.damaged
        has_moved_on = head is not None and (mine is None or head.digest != mine.digest)
        if has_moved_on and not is_damaged:
            self._scrub.forget_rebuild(span)  # the next comparison asks again
            return []
        if has_moved_on and mine is not None:
            return [RebuildSpan(span=span)]
        if not is_damaged and not self._scrub.rebuilt(span):
            return []
        if mine is not None and head is not None and state is not None:
            text = f"{span} was damaged in memory; repaired from the checkpoint and the entries on this disk"
            return [Report(topic="content", text=text), self._mend(span, head, state)]
        if is_damaged:
            return [self._replace_damaged(span, donors)]
        if self._scrub.overrulers(span, self._quorums.contents):
            return [self._overrule(span)]
        if head is None:
            return [self._break_tie(span)]
        text = f"{span} matches this disk; peers that differ must be wrong"
        return [Report(topic="content-sound", text=text), *self._ask_electorate(span.fragment, now)]

    def _mend(self, span: SpanId, head: SpanHead, state: bytes) -> Action:
        """Replace the bytes of a span with those rebuilt from this peer's disk."""
        self._fetcher.drop(span)
        self._differences.replaced(span)
        return ReplaceSpan(span=span, head=head, state=state, is_mended=True)

    def _replace_damaged(self, span: SpanId, donors: Sequence[PeerId]) -> Report:
        """Fetch a damaged span at its current tip, because this disk does not reach it."""
        self._scrub.damage(span, is_disk_asked=False)  # until the next round, or until what is fetched is given up
        if not donors:
            text = f"{span} cannot be rebuilt from this disk, and no peer here can serve it; it stays unchanged"
            return Report(topic="content", text=text)
        self._differences.want_span(span, donors[0])
        return Report(topic="content", text=f"{span} cannot be rebuilt from this disk; fetching it again")

    def _ask_electorate(self, fragment: int, now: float) -> list[Action]:
        """Ask all voters at once for their digests of a fragment.

        If a bit flipped before the checkpoint, this peer's disk is wrong too. Only answers about the same entry make a
        majority, and if a peer has few links, most voters are unlinked.
        """
        self._scrub.ask_again(fragment)
        voters = sorted(self._quorums.contents.holders)
        asks = [ask for voter in voters for ask in self.ask_content(fragment, voter, now)]
        return asks + self.ask_indirect([fragment], now)

    def _overrule(self, span: SpanId) -> Report:
        """Fetch a span again from one of a majority that holds other bytes."""
        others = self._scrub.overrulers(span, self._quorums.contents)
        self._differences.want_span(span, others[0], is_overruled=True)
        self._scrub.moved(span)
        return Report(topic="content", text=f"{span} differs from what a majority holds; fetching it again")

    def _break_tie(self, span: SpanId) -> Report:
        """Settle a difference from the only other member that this peer's disk cannot decide: one of the two must move.

        The peer with the greater key moves at once. The other one moves if they still differ in the next scrub: then
        the first one's disk has confirmed its bytes. With more members, a majority decides.
        """
        other = self._scrub.accusers(span)[0]
        if self._quorums.contents.only != other:
            text = f"{span} differs from what {short_peer_id(other)} holds, and this disk cannot decide; keeping it"
            return Report(topic="content", text=f"{text} unless a majority disagrees")
        moves = self._me > other or self._scrub.is_unsettled(span)
        if moves:
            self._scrub.moved(span)
            self._differences.yield_to(span, other)
        what = "fetching it from that peer" if moves else "keeping it, because the other peer has to move"
        text = f"{span} differs from what {short_peer_id(other)} holds, and no checkpoint here can decide; {what}"
        return Report(topic="content", text=text)
