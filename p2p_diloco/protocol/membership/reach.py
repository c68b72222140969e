"""Whether others can reach this peer: nobody is dialable by its own word.

A peer starts as outbound only. Members of the run and its bootstrap (the provers) dial it afresh on request, at the
host from which they see it and the port that it announces, and answer yes or no. Which of these answers count depends
on the network in which they were given: a private address proves something only to those who share that network.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from p2p_diloco.ids import PeerId

ENOUGH_PROOFS = 2
"""So many other peers must have proved it before no more are asked; one is enough to begin with."""
PROOF_SECONDS = 3600.0
RENEW_SECONDS = 0.5 * PROOF_SECONDS
ANSWER_SECONDS = 15.0
"""A prover that has not answered by then is asked again later."""
FIRST_RETRY_SECONDS = 30.0
LAST_RETRY_SECONDS = RENEW_SECONDS
UNSEEN_SECONDS = 30.0
"""A member that was never linked for so long lives elsewhere; before, it may just not have been dialled yet."""
MOST_REMEMBERED = 4096


class Network(enum.IntEnum):
    """How far an address leads: within this machine, within one site, or everywhere."""

    MACHINE = 0
    SITE = 1
    WORLD = 2


def network_of(host: str) -> Network:
    """Return how far an IP address leads; a zone such as `%eth0` is not looked at.

    Raises:
        ValueError: it is none.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_loopback:
        return Network.MACHINE
    return Network.WORLD if address.is_global else Network.SITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one prover.

    Attributes:
        host, port: where it dialled: the host from which it sees this peer, a port that this peer announces.
        reason: why it did not get through; empty when it did.
    """

    host: str
    port: int
    reason: str
    at: float

    @property
    def place(self) -> str:
        """Return host and port as people write them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The verdict that follows from the answers.

    Attributes:
        is_reachable: whether this peer may say that it can be dialled.
        proofs: answers that got through, newest first, those that count here before others.
        failures: answers that did not, newest first.
        num_proved: how many provers got through in the network that counts.
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


class Reach:
    """Chooses the peers to ask for proofs, and weighs their answers. A state machine without I/O or clock.

    The rule. Of each prover the latest answer counts, for `PROOF_SECONDS`. An answer at a public address counts always,
    one at a private address while every other member is seen from a private one, one within this machine while all are
    within it. A peer is reachable while more of the answers that count got through than did not. A no is asked about
    again after half a minute, then ever later, and brings further provers in.
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
        """Return which of the provers that are linked now to ask; they count as asked.

        Args:
            preferred: those of them whose proofs the roster rule counts; asked first, until enough have answered.
        """
        counted = [(peer, word) for peer, word in self._words(now) if network_of(word.host) >= self._company]
        wanted = _num_wanted(word for _, word in counted)
        wanted_preferred = _num_wanted(word for peer, word in counted if peer in preferred)
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
            prover = self._provers.setdefault(peer, _Prover())
            prover.not_before = now + ANSWER_SECONDS + prover.pause
            prover.pause = min(2 * prover.pause, LAST_RETRY_SECONDS)
        return tuple(chosen)

    def take(self, peer: PeerId, answer: Answer) -> None:
        """Take the answer of a prover that was asked."""
        prover = self._provers.get(peer)
        if prover is None:
            return
        prover.answer = answer
        if not answer.reason:
            prover.not_before, prover.pause = answer.at + RENEW_SECONDS, FIRST_RETRY_SECONDS

    def forget(self) -> None:
        """Begin anew: this peer's addresses have changed."""
        self._provers.clear()

    # -- judging

    def see(self, hosts: Mapping[PeerId, Iterable[str]]) -> None:
        """Note from where linked peers are seen; their nearest address counts, and stays after the link is lost."""
        for peer, seen in hosts.items():
            networks = [network_of(host) for host in seen]
            if networks and (peer in self._seen_at or len(self._seen_at) < MOST_REMEMBERED):
                self._seen_at[peer] = min(networks)

    def standing(self, provers: Collection[PeerId], company: Collection[PeerId], now: float) -> Standing:
        """Return what follows from the answers.

        Args:
            provers: whose answers count: members of the run and its bootstrap, linked or not.
            company: the peers that must be able to dial this one.
        """
        self._company = self._farthest(company, now)
        counted, others = list[Answer](), list[Answer]()
        for peer, answer in self._words(now):
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
        """Return the network in which all of `company` can be met; who was never seen for long is out in the world."""
        self._missed_since = {p: self._missed_since.get(p, now) for p in company if p not in self._seen_at}
        if any(now - since >= UNSEEN_SECONDS for since in self._missed_since.values()):
            return Network.WORLD
        return max((self._seen_at[peer] for peer in company if peer in self._seen_at), default=Network.MACHINE)

    def _words(self, now: float) -> list[tuple[PeerId, Answer]]:
        """Return the answers that are young enough, and whose they are."""
        answers = ((peer, prover.answer) for peer, prover in self._provers.items())
        return [(peer, a) for peer, a in answers if a is not None and now - a.at < PROOF_SECONDS]


def _num_wanted(answers: Iterable[Answer]) -> int:
    """Return how many more answers are wanted: each no is to be outweighed, or confirmed."""
    return ENOUGH_PROOFS + sum(1 if answer.reason else -1 for answer in answers)


def _newest_first(answers: Iterable[Answer]) -> list[Answer]:
    return sorted(answers, key=lambda answer: -answer.at)
