"""Archivists in real processes: one is killed and restarted, and all exports of a cycle are the same files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from p2p_diloco.storage.export_folder import WORD_FILE
from tests.processes.machines import Machines

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(600)]

EVERY, KEEP = 3, 3
ROUNDS = ["--rounds.round_seconds", "2", "--rounds.fragments", "2", "--step-seconds", "0.05"]
LAST_ROUND = 89
"""The end of cycle 45, which is exported."""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path)
    yield machines
    machines.close()


def exports(machines: Machines, name: str) -> list[str]:
    folder = machines.folder / f"exports-{name}"
    return sorted(os.listdir(folder)) if folder.exists() else []


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != WORD_FILE}


def test_an_archivist_is_killed_and_restarted_and_exports_what_the_others_hold(machines: Machines) -> None:
    end = ["--until-round", str(LAST_ROUND)]
    machines.run("new", *ROUNDS)
    machines.start("boot", "bootstrap", "run.toml", *end)
    invite = machines.invite("boot")
    machines.start("ann", "join", invite, "--device", "cpu", *end)
    archive = ["archive", invite, "--every", str(EVERY), "--keep", str(KEEP), *end, "--into"]
    machines.start("archie", *archive, "exports-archie")
    machines.start("bert", *archive, "exports-bert")
    machines.wait("an export", lambda: exports(machines, "archie"))
    machines.kill("archie")
    before = exports(machines, "archie")
    machines.start("archie", *archive, "exports-archie")
    machines.wait("the last round", lambda: all(peer.poll() is not None for peer in machines.peers.values()))

    wrote = [text for text in machines.events("archie", "export") if text.startswith("wrote")]
    assert len(wrote) == len(set(wrote)), "no cycle is exported twice"
    assert len(wrote) > len([name for name in before if not name.startswith(".")]), machines.story()
    assert len(exports(machines, "archie")) == len(exports(machines, "bert")) == KEEP, machines.story()
    assert [name for name in exports(machines, "archie") if name.startswith(".")] == []
    both = sorted({*exports(machines, "archie")} & {*exports(machines, "bert")})
    assert f"cycle-{(LAST_ROUND + 1) // 2:09d}" in both
    for name in both:
        assert files(machines.folder / "exports-archie" / name) == files(machines.folder / "exports-bert" / name)

    machines.run("export", "own", "--state-directory", str(machines.state("ann")))
    last = machines.folder / "exports-archie" / both[-1]
    own = files(machines.folder / "own")
    assert {name: content for name, content in files(last).items() if name != "README.md"} == {
        name: content for name, content in own.items() if name != "README.md"
    }
    digest, loss = machines.status("ann").state_digest, machines.status("archie").anchor_loss
    assert machines.status("archie").state_digest == digest != ""
    card = (last / "README.md").read_text()
    assert f"| state | `{digest}`" in card
    assert f"| held-out loss | {loss:.4f} nats per token, of these parameters |" in card
    with safe_open(last / "model.safetensors", framework="numpy") as file:
        assert file.metadata()["run"] == machines.status("ann").run
    print(
        f"exported in both: {', '.join(both)}; held-out loss {loss:.4f}, size {len(own['model.safetensors']):,} bytes"
    )
    check_with_transformers(last)


def check_with_transformers(folder: Path) -> None:
    """Load an export as its card says, if transformers is here."""
    try:
        import transformers
    except ImportError:
        print("transformers is not here; `make models` brings it")
        return
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("def main", return_tensors="pt").input_ids
    assert len(tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=8)[0])) > len("def main")
