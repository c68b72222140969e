"""The drawn page: rooms above those that they import, and the stages of each way."""

from __future__ import annotations

from pathlib import Path

from gauges.picture import DRAWN, page
from gauges.tree import Tree
from gauges.ways import WAYS


def test_arrows_lead_to_rooms_that_no_other_arrow_leads_to(tmp_path: Path) -> None:
    files = {
        "ids": "",
        "api": "from p2p_diloco.node.node import x",
        "node/node": "from p2p_diloco.rules.rule import x\nfrom p2p_diloco.ids import x",
        "rules/rule": "from p2p_diloco.ids import x\nfrom p2p_diloco.rules.other import x",
        "rules/other": "",
    }
    for module, text in files.items():
        path = tmp_path / f"p2p_diloco/{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    drawn = page(Tree(tmp_path), {name: [[f"{name}{n}"] for n, _ in enumerate(WAYS[name])] for name in DRAWN})
    assert [line for line in drawn.splitlines() if "-->" in line][:3] == [
        "  api --> node",
        "  node --> rules",
        "  rules --> base",
    ]
    assert '  rules["rules<br/>2 in 2"]' in drawn
    assert "<br/>heartbeat2" in drawn
