"""Alerts: each one fires for the figures that it is for, and none for a run that is well. promtool evaluates them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.app.page.metrics import COUNTERS, GAUGES

pytestmark = pytest.mark.long

ALERTS = Path(__file__).parents[2] / "bootstrap" / "alerts.yml"
LABELS = 'run="tales", peer="ann"'
WELL = {
    'up{job="p2p_diloco", instance="here"}': "1x180",
    f"p2p_diloco_running{{{LABELS}}}": "1x180",
    f"p2p_diloco_status_timestamp_seconds{{{LABELS}}}": "0+60x180",
    f"p2p_diloco_alarms{{{LABELS}}}": "0x180",
    f"p2p_diloco_members{{{LABELS}}}": "3x180",
    f"p2p_diloco_members_ready{{{LABELS}}}": "3x180",
    f"p2p_diloco_entries_absorbed_total{{{LABELS}}}": "0+40x180",
    f"p2p_diloco_rounds_closed_total{{{LABELS}}}": "0+10x180",
    f"p2p_diloco_degraded_rosters{{{LABELS}}}": "0x180",
    f"p2p_diloco_heldout_loss{{{LABELS}}}": "3-0.01x180",
    f"p2p_diloco_participation_ratio{{{LABELS}}}": "0.95x180",
}
"""Figures of three hours, one a minute, in the notation of promtool."""
WRONG = {
    "PageDown": {"up": "1x60 0x120"},
    "PeerDown": {"p2p_diloco_running": "1x60 0x120"},
    "PeerHangs": {"p2p_diloco_status_timestamp_seconds": "0+60x60 3600x120"},
    "NeedsAttention": {"p2p_diloco_alarms": "0x60 1x120"},
    "NobodyReady": {"p2p_diloco_members_ready": "3x60 0x120"},
    "RunStandsStill": {"p2p_diloco_entries_absorbed_total": "0+40x60 2400x120"},
    "DecidedByFew": {"p2p_diloco_degraded_rosters": "0x70 1x110"},
    "LossRises": {"p2p_diloco_heldout_loss": "2x60 2.5x120"},
    "LittleArrives": {"p2p_diloco_participation_ratio": "0.9x60 0.4x120"},
}
"""For each alert, figures that go wrong after an hour."""


def rules() -> list[dict[str, str]]:
    """Return name and text of each alert; the file has one key a line."""
    found: list[dict[str, str]] = []
    for line in ALERTS.read_text(encoding="utf-8").splitlines():
        key, _, value = line.strip().removeprefix("- ").partition(": ")
        if key == "alert":
            found.append({"alert": value})
        elif found:
            found[-1][key] = value
    return found


def fired(folder: Path, changes: dict[str, str], *, at: str) -> set[str]:
    """Return the alerts that fire for figures that differ from those of a run that is well."""
    names = [rule["alert"] for rule in rules()]
    series = [
        {"series": name, "values": next((new for key, new in changes.items() if name.startswith(f"{key}{{")), values)}
        for name, values in WELL.items()
    ]
    alerts: set[str] = set()
    for name in names:
        test: dict[str, Any] = {
            "rule_files": [str(ALERTS)],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": series,
                    "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": []}],
                }
            ],
        }
        path = folder / "test.json"  # JSON is YAML
        path.write_text(json.dumps(test), encoding="utf-8")
        done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        assert done.returncode == 0 or f"alertname: {name}" in output, output
        if done.returncode != 0:
            alerts.add(name)
    return alerts


@pytest.fixture(autouse=True)
def _needs_promtool() -> None:
    assert shutil.which("promtool"), "promtool is missing; install it, such as: apt-get install prometheus"


def test_every_alert_has_a_case() -> None:
    assert {rule["alert"] for rule in rules()} == set(WRONG)


def test_alerts_use_figures_that_the_page_has() -> None:
    known = {f"p2p_diloco_{name}" for name in GAUGES} | {f"p2p_diloco_{name}_total" for name in COUNTERS}
    known |= {"p2p_diloco_running", "p2p_diloco_alarms", "up"}
    assert {name.partition("{")[0] for name in WELL} <= known


def test_no_alert_fires_for_a_run_that_is_well(tmp_path: Path) -> None:
    assert fired(tmp_path, {}, at="2h") == set()


@pytest.mark.parametrize("name", WRONG)
def test_an_alert_fires_for_what_it_is_for_and_alone(tmp_path: Path, name: str) -> None:
    assert fired(tmp_path, WRONG[name], at="80m") == {name}
