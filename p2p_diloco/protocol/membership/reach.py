"""Whether others can reach this peer: a peer's own claim does not make it reachable.

A peer starts as outbound only. Members of the run and its bootstrap peer (the provers) dial it over a fresh connection
on request, at the host from which they see it and the port that it announces, and answer yes or no. Which of these
answers count depends on the network: an answer at a private address proves something only within that network.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from p2p_diloco.ids import PeerId

ENOUGH_PROOFS = 2
"""Number of proofs by other peers after which no more provers are asked; one is enough to begin with."""
PROOF_SECONDS = 3600.0
RENEW_SECONDS = 0.5 * PROOF_SECONDS
ANSWER_SECONDS = 15.0
"""Time in which a prover should answer; if it does not, it is asked again later."""
FIRST_RETRY_SECONDS = 30.0
LAST_RETRY_SECONDS = RENEW_SECONDS
UNSEEN_SECONDS = 10.0
"""Time after which a member that was never linked is taken to be in another network, and not just not dialled yet.
Until then it cannot contribute to what this peer reduces."""
MOST_REMEMBERED = 4096


class Network(enum.IntEnum):
    """From where an address can be reached: from this machine, from one site, or from everywhere."""

    MACHINE = 0
    SITE = 1
    WORLD = 2


def network_of(host: str) -> Network:
    """Return from where an IP address can be reached; a zone such as `%eth0` is ignored.

    Raises:
        ValueError: `host` is not an IP address.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_loopback:
        return Network.MACHINE
    return Network.WORLD if address.is_global else Network.SITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of one prover.

    Attributes:
        host, port: what it dialled: the host from which it sees this peer, and a port that this peer announces.
        reason: why it could not connect; empty if it could.
    """

    host: str
    port: int
    reason: str
    at: float

    @property
    def place(self) -> str:
        """Return host and port in the usual notation."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The verdict that follows from the answers.

    Attributes:
        is_reachable: whether this peer may claim that it can be dialled.
        proofs: answers of provers that could connect; those that count come first, each group newest first.
        failures: answers of provers that could not connect, in the same order.
        num_proved: number of provers that could connect in the network that counts.
    """

    is_reachable: bool
    proofs: tuple[Answer, ...] = ()
    failures: tuple[Answer, ...] = ()
    num_proved: int = 0


@dataclass(slots=True)
class _Prover:
    not_before: float = 0.0
    pause: float = FIRST_RETRY_SECONDS
    answer: Answer | None = None

    def requested(self, now: float) -> None:
        self.not_before = now + ANSWER_SECONDS + self.pause
        self.pause = min(2 * self.pause, LAST_RETRY_SECONDS)

    def answered(self, answer: Answer) -> None:
        self.answer = answer
        if not answer.reason:
            self.not_before, self.pause = answer.at + RENEW_SECONDS, FIRST_RETRY_SECONDS

    def renew(self) -> None:
        if self.answer is not None:
            self.not_before = min(self.not_before, self.answer.at + ANSWER_SECONDS)


class Reach:
    """Chooses the peers to ask for proofs, and weighs their answers. A state machine without I/O or clock.

    The latest answer of each prover counts, for `PROOF_SECONDS`. An answer at a public address always counts; one at a
    private address counts while every other member is seen from a private address, and one within this machine while
    all members are within it. A peer is reachable while more of the answers that count are yes than no. After a no, the
    prover is asked again after half a minute, then at growing intervals, and further provers are asked.
    """

    def __init__(self) -> None:
        self._provers: dict[PeerId, _Prover] = {}
        self._seen_at: dict[PeerId, Network] = {}
        self._missed_since: dict[PeerId, float] = {}
        self._company = Network.MACHINE

    # -- asking

    def due(
        self, provers: Collection[PeerId], now: float, preferred: Collection[PeerId] = frozenset()
    ) -> tuple[PeerId, ...]:
        """Return the provers to ask now; they then count as asked.

        Args:
            provers: the provers that are linked now.
            preferred: provers whose proofs the roster rule counts; asked first, until enough have answered.
        """
        counted = [(peer, answer) for peer, answer in self.recent(now) if network_of(answer.host) >= self._company]
        wanted = _num_wanted(answer for _, answer in counted)
        wanted_preferred = _num_wanted(answer for peer, answer in counted if peer in preferred)
        chosen: list[PeerId] = []
        for peer in sorted(provers, key=lambda peer: (peer not in preferred, peer)):
            prover = self._provers.get(peer)
            if prover is not None and now >= prover.not_before:
                chosen.append(peer)
                continue
            is_wanted = (wanted_preferred if peer in preferred else wanted) > 0
            if prover is None and is_wanted and len(self._provers) < MOST_REMEMBERED:
                wanted, wanted_preferred = wanted - 1, wanted_preferred - (peer in preferred)
                chosen.append(peer)
        for peer in chosen:
            self._provers.setdefault(peer, _Prover()).requested(now)
        return tuple(chosen)

    def take(self, peer: PeerId, answer: Answer) -> None:
        """Receive the answer of a prover that was asked."""
        if peer in self._provers:
            self._provers[peer].answered(answer)

    def renew(self, peer: PeerId) -> None:
        """Ask a prover again soon, though its answer is recent, because its proof does not count.

        Call this once for each proof: a second call would bring forward the request that the first one caused.
        """
        if peer in self._provers:
            self._provers[peer].renew()

    def forget(self) -> None:
        """Start over, because this peer's addresses have changed."""
        self._provers.clear()

    # -- judging

    def see(self, hosts: Mapping[PeerId, Iterable[str]]) -> None:
        """Note at which hosts linked peers are seen; the nearest one counts, and is kept after the link is lost."""
        for peer, seen in hosts.items():
            networks = [network_of(host) for host in seen]
            if networks and (peer in self._seen_at or len(self._seen_at) < MOST_REMEMBERED):
                self._seen_at[peer] = min(networks)

    @property
    def has_seen_outsiders(self) -> bool:
        """Whether a peer was ever seen from a public address."""
        return Network.WORLD in self._seen_at.values()

    def standing(self, provers: Collection[PeerId], company: Collection[PeerId], now: float) -> Standing:
        """Return what follows from the answers.

        Args:
            provers: peers whose answers count: members of the run and its bootstrap peer, linked or not.
            company: the peers that must be able to dial this one.
        """
        self._company = self._farthest(company, now)
        counted, others = list[Answer](), list[Answer]()
        for peer, answer in self.recent(now):
            does_count = peer in provers and network_of(answer.host) >= self._company
            (counted if does_count else others).append(answer)
        num_proved = sum(not answer.reason for answer in counted)
        ordered = [*_newest_first(counted), *_newest_first(others)]
        return Standing(
            is_reachable=2 * num_proved > len(counted),
            proofs=tuple(answer for answer in ordered if not answer.reason),
            failures=tuple(answer for answer in ordered if answer.reason),
            num_proved=num_proved,
        )

    def _farthest(self, company: Collection[PeerId], now: float) -> Network:
        """Return the smallest network that holds all of `company`; `WORLD` if one of them stays unseen for too long."""
        missed = {peer: self._missed_since.get(peer, now) for peer in company if peer not in self._seen_at}
        # Kept when a peer is not in the company any more: one that comes and goes must not be waited for anew.
        kept = {peer: since for peer, since in self._missed_since.items() if peer not in self._seen_at}
        self._missed_since = dict([*kept.items(), *missed.items()][-MOST_REMEMBERED:])
        if any(now - since >= UNSEEN_SECONDS for since in missed.values()):
            return Network.WORLD
        return max((self._seen_at[peer] for peer in company if peer in self._seen_at), default=Network.MACHINE)

    def recent(self, now: float) -> list[tuple[PeerId, Answer]]:
        """Return the answers that are recent enough, with their provers."""
        answers = ((peer, prover.answer) for peer, prover in self._provers.items())
        return [(peer, a) for peer, a in answers if a is not None and now - a.at < PROOF_SECONDS]


def _num_wanted(answers: Iterable[Answer]) -> int:
    """Return how many more answers are wanted: each no must be outweighed or confirmed."""
    return ENOUGH_PROOFS + sum(1 if answer.reason else -1 for answer in answers)


def _newest_first(answers: Iterable[Answer]) -> list[Answer]:
    return sorted(answers, key=lambda answer: -answer.at)
