"""`/metrics`: the figures of a page's peers in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from p2p_diloco.app.page.facts import PeerView, alarms, member_state
from p2p_diloco.status.status_file import PeerStatus
from p2p_diloco.wording import short_peer

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_PEER = ("run", "peer")

GAUGES: dict[str, tuple[str, str]] = {
    "round": ("round", "current round"),
    "members": ("num_members", "members that train"),
    "members_ready": ("num_ready", "members that hold the current model"),
    "participation_ratio": ("participation", "share of possible contributions that were included"),
    "heldout_loss": ("anchor_loss", "held-out loss of the shared model, nats per token"),
    "training_loss": ("loss", "last training loss of this peer, nats per token"),
    "tokens_per_second": ("tokens_per_second", "recent rate of this peer"),
    "degraded_rosters": ("degraded_rosters", "rosters certified without a majority"),
    "weight_ratio": ("weight", "share of this peer in the means"),
    "upload_bits_per_second": ("upload_rate", "recent upload rate"),
    "download_bits_per_second": ("download_rate", "recent download rate"),
    "status_timestamp_seconds": ("updated", "time of the last status"),
}
"""Gauges by their name after `p2p_diloco_`: field of the status, and meaning."""
COUNTERS: dict[str, tuple[str, str]] = {
    "tokens": ("tokens", "tokens that this peer trained on"),
    "steps": ("inner_steps", "optimiser steps of this peer"),
    "rounds_closed": ("rounds_closed", "rounds closed since the start"),
    "entries_absorbed": ("entries_absorbed", "entries applied since the start"),
    "steps_undone": ("steps_undone", "steps undone because of a NaN or an infinity"),
}


class _PeerCollector(Collector):
    def __init__(self, views: Sequence[PeerView], is_public: bool) -> None:
        self._views, self._is_public = views, is_public

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of all peers."""
        labelled = [(self._labels(view.status, number), view) for number, view in enumerate(self._views, 1)]
        for name, (field, meaning) in GAUGES.items():
            gauge = GaugeMetricFamily(f"p2p_diloco_{name}", meaning, labels=_PEER)
            for labels, view in labelled:
                if (value := getattr(view.status, field)) is not None:
                    gauge.add_metric(labels, float(value))
            yield gauge
        for name, (field, meaning) in COUNTERS.items():
            counter = CounterMetricFamily(f"p2p_diloco_{name}", meaning, labels=_PEER)
            for labels, view in labelled:
                counter.add_metric(labels, float(getattr(view.status, field)))
            yield counter
        yield from self._others(labelled)

    def _others(self, labelled: Sequence[tuple[Sequence[str], PeerView]]) -> Iterator[Metric]:
        running = GaugeMetricFamily("p2p_diloco_running", "whether the peer's process is alive", labels=_PEER)
        trouble = GaugeMetricFamily("p2p_diloco_alarms", "sentences under Needs attention on the page", labels=_PEER)
        swarm = GaugeMetricFamily("p2p_diloco_swarm_tokens_per_second", "rate of all members together", labels=_PEER)
        sent = CounterMetricFamily("p2p_diloco_sent_bytes", "bytes sent since the start", labels=(*_PEER, "purpose"))
        received = CounterMetricFamily(
            "p2p_diloco_received_bytes", "bytes received since the start", labels=(*_PEER, "purpose")
        )
        states = GaugeMetricFamily("p2p_diloco_peers", "other peers by state", labels=(*_PEER, "state"))
        phase = InfoMetricFamily("p2p_diloco_phase", "phase of the peer", labels=_PEER)
        for labels, view in labelled:
            status = view.status
            running.add_metric(labels, float(view.is_running))
            trouble.add_metric(labels, float(len(alarms(view, is_public=self._is_public))))
            phase.add_metric(labels, {"phase": status.phase})
            if view.points:
                swarm.add_metric(labels, view.points[-1].swarm_rate)
            for family, counts in ((sent, status.bytes_sent), (received, status.bytes_received)):
                for purpose in ("vectors", "control", "transfer"):
                    family.add_metric((*labels, purpose), float(getattr(counts, purpose)))
            found = [member_state(line) for line in status.peers]
            for state in ("training", "catching up", "paused", "serving", "silent"):
                states.add_metric((*labels, state), float(found.count(state)))
        yield from (running, trouble, swarm, sent, received, states, phase)

    def _labels(self, status: PeerStatus, number: int) -> tuple[str, str]:
        return status.run_name, str(number) if self._is_public else short_peer(status.peer)


def exposition(views: Sequence[PeerView], *, is_public: bool) -> bytes:
    """Return the metrics of some peers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_PeerCollector(views, is_public))
    return generate_latest(registry)
