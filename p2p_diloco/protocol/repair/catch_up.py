"""The one repair: compare at a closed boundary, fetch missing entries, replay in parent order, compare contents.

It serves joiners, stragglers and healed splits alike. `Differences` decides what is missing, `Fetcher` gets it,
`Verifier` judges what came, and what is held already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.actions import Action
from p2p_diloco.protocol.repair.differences import Differences
from p2p_diloco.protocol.repair.fetcher import CatchUpRules, Fetcher
from p2p_diloco.protocol.repair.reports import Reports
from p2p_diloco.protocol.repair.scrub import Scrub
from p2p_diloco.protocol.repair.signed_content import IndirectVoters
from p2p_diloco.protocol.repair.verifier import Verifier
from p2p_diloco.protocol.round.chain import ChainBook


class CatchUp:
    """The parts of one peer's repair, and their order. No state of its own.

    Call `quorums.set` before anything that counts answers, and `pump` after every change and regularly.

    Args:
        damaged: spans that are known to be damaged; see `Scrub`.
    """

    def __init__(
        self,
        *,
        me: PeerId,
        rules: CatchUpRules,
        chains: ChainBook,
        indirect: IndirectVoters,
        damaged: Mapping[SpanId, bool] | None = None,
    ) -> None:
        self.rules = rules
        self.chains = chains
        self.indirect = indirect
        reports = Reports(rules=rules, chains=chains)
        self.quorums = reports.quorums
        self.scrub = scrub = Scrub(rules=rules, damaged=damaged)
        self.fetcher = fetcher = Fetcher(rules=rules, chains=chains)
        self.differences = differences = Differences(reports=reports, fetcher=fetcher, scrub=scrub)
        self.verifier = Verifier(
            me=me, reports=reports, indirect=indirect, fetcher=fetcher, differences=differences, scrub=scrub
        )

    def is_complete(self) -> bool:
        return self.differences.is_complete()

    @property
    def lacks_names(self) -> bool:
        """Return whether a span waits for a majority to name its tip or its bytes."""
        return self.differences.is_parted or self.verifier.is_unsure

    def adopt(self) -> None:
        """Abandon our branch: fetch spans that differ from a donor of the other branch, even if our log is longer."""
        self.differences.adopt()
        self.scrub.begin_again()

    def pump(
        self,
        donors: Sequence[PeerId],
        now: float,
        sources: Sequence[PeerId] | None = None,
        holders: Sequence[PeerId] = (),
    ) -> list[Action]:
        """Send all requests that are due, to donors and witnesses.

        Args:
            donors: peers to ask for entries, and for spans if one of them is the preferred donor.
            sources: peers to ask for other spans; None: the donors.
            holders: peers that hold a state, ready or not. The next entry, or the majority's span, may be theirs alone.
        """
        sources = donors if sources is None else sources
        everybody = list(dict.fromkeys([*donors, *sources, *holders]))
        self.differences.forget_absent(everybody)
        actions = self.verifier.ask_names(now)
        reports, unanswered = self.fetcher.time_out(everybody, now)
        for span, donor in unanswered:
            self.differences.entry_unanswered(span, donor)
        return actions + reports + self.fetcher.send_requests(donors, sources, holders, now)
