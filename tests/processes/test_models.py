"""Models and texts of one organiser, trained by islands with only the invite: real processes, `make models`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from p2p_diloco.app.models.hugging_face import hugging_face_model
from p2p_diloco.session.learnt_model import load_learnt_model
from tests.processes.machines import PROJECT, Machines, wait_for_end
from tests.status.kept_events import read_events

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(600)]

INPUTS = PROJECT / "examples" / "hugging-face" / "make_inputs.py"
ROUNDS = ["--rounds.round_seconds", "3", "--rounds.fragments", "2"]


def needs(package: str) -> Any:
    return pytest.importorskip(package, reason='pip install "p2p-diloco[hf]" brings it; make models runs this')


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    needs("transformers")
    needs("tokenizers")
    machines = Machines(tmp_path)
    machines.run(program=(str(INPUTS),))
    machines.run("tokenize", "tokens", "documents.jsonl", "--tokenizer", "llama")
    yield machines
    machines.close()


def first_loss(machines: Machines, name: str) -> float:
    """Return the first measured held-out loss of the shared model."""
    event = next(iter(read_events(machines.state(name), "evaluation")))
    return float(event.figures["anchor_loss"])


def test_three_islands_train_a_llama_on_a_text_that_only_one_of_them_has(machines: Machines) -> None:
    transformers = needs("transformers")
    machines.run("new", "--model", "hf:llama", "--data.path", "tokens", "--data.share", "true", *ROUNDS)
    machines.start("ann", "join", "--found", "run.toml", "--evaluate-seconds", "5", "--until-round", "40")
    invite = machines.invite("ann")
    names = ["ann", "bob", "cay"]
    for name in names[1:]:
        machines.start(name, "join", invite, "--evaluate-seconds", "5", "--until-round", "40")
    machines.wait("steps everywhere", lambda: all(machines.status(name).inner_steps > 5 for name in names))
    shutil.rmtree(machines.folder / "llama")  # nobody needs it any more
    wait_for_end(machines, names)
    for name in names:
        status = machines.status(name)
        print(
            f"{name}: {status.inner_steps} steps, participation {status.participation}, shared model "
            f"{first_loss(machines, name):.3f} → {status.anchor_loss:.3f}, sent {status.bytes_sent}"
        )
        assert status.anchor_loss < first_loss(machines, "ann") - 1.0, machines.story()
        assert status.entries_absorbed > 20
    assert machines.events("bob", "text"), "it had no copy"

    machines.run("export", "model", "--state-directory", str(machines.state("cay")))
    exported = transformers.AutoModelForCausalLM.from_pretrained(machines.folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(machines.folder / "model")
    learnt = load_learnt_model(machines.state("bob"))
    section = learnt.manifest.model
    assert section.config is not None
    own = hugging_face_model(section.config, context=section.context or 0).module.eval()
    own.load_state_dict(learnt.parameters)
    ids = tokenizer("import os\n\ndef main():\n    return", return_tensors="pt").input_ids
    with torch.no_grad():
        difference = (exported(ids).logits - own(ids).logits).abs().max().item()
    print(f"largest difference of logits between the export and another peer's model: {difference:.1e}")
    assert difference <= 1e-5
    plain = [name for name, _, mean in section.tensors if mean == "plain"]
    assert plain == ["model.embed_tokens.weight", "lm_head.weight"]


def write_base(machines: Machines) -> None:
    """Write a model with random weights into the folder `base`."""
    transformers = needs("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(machines.folder / "llama")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(machines.folder / "base")


def test_islands_continue_from_weights_and_adapt_them_with_lora(machines: Machines) -> None:
    needs("peft")
    write_base(machines)
    sent: dict[str, int] = {}
    for kind, values in {"weights": [], "lora": ["--model.lora_rank", "8", "--inner.learning_rate", "0.002"]}.items():
        words = ["--model", "hf:base", "--model.weights", "loaded", "--data.path", "tokens", *values, *ROUNDS]
        machines.run("new", f"{kind}.toml", *words)
        flags = ["--data", "tokens", "--evaluate-seconds", "5", "--until-round", "24", "--model", "base"]
        machines.start(f"ann-{kind}", "join", "--found", f"{kind}.toml", *flags)
        machines.start(f"bob-{kind}", "join", machines.invite(f"ann-{kind}"), *flags)
        names = [f"ann-{kind}", f"bob-{kind}"]
        wait_for_end(machines, names)
        status = machines.status(names[1])
        sent[kind] = status.bytes_sent.vectors
        print(
            f"{kind}: {status.parameters:,} parameters exchanged, {sent[kind]:,} bytes of vectors sent in "
            f"{status.rounds_closed} rounds, shared model {first_loss(machines, names[0]):.4f} → "
            f"{status.anchor_loss:.4f}"
        )
        assert status.anchor_loss < first_loss(machines, names[0])
        machines.run("export", f"out-{kind}", "--state-directory", str(machines.state(names[1])))
    assert (machines.folder / "out-lora" / "adapter_model.safetensors").exists()
    assert sent["lora"] < sent["weights"] / 5


@pytest.mark.parametrize("kind", ["built-in", "weights", "lora"])
def test_a_run_with_half_the_rate_continues_where_the_other_ended(machines: Machines, kind: str) -> None:
    model, text, flags = [], [], ["--evaluate-seconds", "5", "--until-round"]
    if kind != "built-in":
        model, text, flags = ["--model", "hf:llama"], ["--data.path", "tokens"], ["--data", "tokens", *flags]
    if kind == "lora":
        needs("peft")
        write_base(machines)
        model = ["--model", "hf:base", "--model.weights", "loaded", "--model.lora_rank", "8"]
        flags = ["--model", "base", *flags]
    machines.run("new", *model, *text, "--inner.learning_rate", "0.004", *ROUNDS)
    machines.start("ann", "join", "--found", "run.toml", *flags, "16")
    wait_for_end(machines, ["ann"])
    last = machines.status("ann").anchor_loss
    shutil.rmtree(machines.folder / "llama")  # nobody needs it any more
    machines.run("export", "out", "--state-directory", str(machines.state("ann")))
    for source, names, rounds in ((str(machines.state("ann")), ["bob", "cay"], "30"), ("out", ["dan"], "16")):
        machines.run("new", f"{names[0]}.toml", "--continue", source, "--inner.learning_rate", "0.002", *text)
        machines.start(names[0], "join", "--found", f"{names[0]}.toml", *flags, rounds)
        for name in names[1:]:
            machines.start(name, "join", machines.invite(names[0]), *flags, rounds)
        wait_for_end(machines, names)
        first, end = first_loss(machines, names[0]), machines.status(names[-1]).anchor_loss
        print(f"{kind} from {source}: the old run ends with {last:.4f}, the new one goes from {first:.4f} to {end:.4f}")
        assert first == pytest.approx(last, rel=0.01)
        assert end <= first
