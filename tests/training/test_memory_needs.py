"""Whether a run fits into the memory of a machine, and what would."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.app.training.memory_needs import Room, check_memory, explain_tight, load_of, needed_bytes
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.errors import ConfigError
from p2p_diloco.signing import SigningKey

GB = 10**9
CPU = Room(device="cpu", host_free=64 * GB, host_total=64 * GB)
GPU = replace(CPU, device="cuda:0", device_free=24 * GB, device_total=24 * GB)


def plan_with(**values: Any) -> RunPlan:
    organiser = SigningKey(b"o" * 32).peer
    return plan_run(draft_manifest(organiser=organiser, now_seconds=0.0, name="needs", values=values))


def base(optimizer: str = "adamw", **model: Any) -> RunPlan:
    model = {"size": "base", **model}
    return plan_with(model=model, inner={"optimizer": optimizer, "step_tokens": 4 * model.get("context", 1024)})


def llama(**model: Any) -> RunPlan:
    rows = (("embedding", (32_000, 2048), "plain"), ("layers", (16 * 8192, 8192), "radial"))
    values = {"source": "hf:owner/llama", "config": "{}", "context": 1024, "vocabulary": 32_000, "tensors": rows}
    return plan_with(model={**values, **model}, inner={"step_tokens": 4096}, rounds={"fragments": 2})


def test_the_bound_counts_each_part() -> None:
    plan = base()
    load, parameters = load_of(plan), plan.num_parameters
    host, device = needed_bytes(load, CPU)
    assert (device, load.moments) == (0, 8 * parameters)
    assert host == 24 * parameters + load.encoded, "φ, m, θ, a gradient and two moments, and what is encoded"
    assert 0.5 < load.encoded / parameters < 1.2
    assert needed_bytes(load, GPU) == (8 * parameters + load.encoded, 16 * parameters)
    assert load_of(base("muon")).moments < 4.1 * parameters


def test_long_windows_need_more_than_gradients() -> None:
    load = load_of(plan_with(model={"size": "tiny", "context": 65_536}, inner={"step_tokens": 65_536}))
    assert load.least_window == 65_536 * (4 * 3 * 160 + 8 * 256) > 4 * load.parameters
    assert needed_bytes(load, GPU)[1] == 4 * load.parameters + load.moments + load.least_window


def test_copies_of_ranks_add_up_on_the_host_and_shards_share_the_model() -> None:
    load, two = load_of(base()), replace(CPU, ranks=2, here=2)
    copies, shards = needed_bytes(load, two)[0], needed_bytes(load, replace(two, has_shards=True))[0]
    alone = needed_bytes(load, CPU)[0]
    assert (copies - alone, shards) == (16 * load.parameters, alone)
    four = needed_bytes(load, replace(GPU, ranks=4, here=4, has_shards=True))
    assert four == (16 * load.parameters, 4 * load.parameters), "each rank first builds the whole model on the host"


@pytest.mark.parametrize("room", [CPU, GPU, replace(GPU, ranks=4, here=4), replace(GPU, ranks=4, has_shards=True)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_is_likely_is_more_than_the_bound(room: Room, optimizer: str) -> None:
    load = load_of(base(optimizer))
    least, likely = needed_bytes(load, room), needed_bytes(load, room, 1)
    assert all(a <= b for a, b in zip(least, likely, strict=True))


def test_what_fits_is_not_refused() -> None:
    for plan in (base(), base("muon"), llama()):
        for room in (CPU, GPU):
            check_memory(plan, room)


ORGANISER = "ask the organiser for a run with "
CASES: list[tuple[RunPlan, Room, str, str]] = [
    (base(), replace(CPU, host_free=2 * GB), "2.0 GB of 64.0 GB are free", "close the programs that use the rest"),
    (
        base(),
        replace(CPU, host_free=3 * GB, host_total=3 * GB),
        "3.0 GB of 3.0 GB are free",
        "export the model without training it, in 2.5 GB: `p2p-diloco archive`; "
        f'or {ORGANISER}inner.optimizer "muon" or model.size "small"',
    ),
    (
        base(),
        replace(CPU, host_free=GB, host_total=GB),
        "1.0 GB of 1.0 GB are free",
        f'{ORGANISER}model.size "small"',
    ),
    (
        base(),
        replace(GPU, host_free=GB, host_total=GB),
        "(1.1 GB to hold the shared model of 125,169,408 parameters), and 1.0 GB of 1.0 GB are free",
        'model.size "small"',
    ),
    (base(), replace(CPU, host_free=1, host_total=1), "1 B of 1 B are free", "take a machine with more memory"),
    (
        base(),
        replace(GPU, device_free=GB, device_total=2 * GB),
        "needs at least 2.0 GB of memory on cuda:0, and 1.0 GB of 2.0 GB are free",
        "train on the processor, which is slower, with --device cpu",
    ),
    (
        base(),
        replace(GPU, device_free=GB * 5 // 4, device_total=GB * 5 // 4, ranks=2, here=2),
        "needs at least 2.0 GB of memory on cuda:0",
        "cut the model among the ranks with --shards always; or train on the processor, which is slower, with "
        "--device cpu --ranks 1",
    ),
    (
        base(),
        replace(CPU, host_free=4 * GB, host_total=4 * GB, ranks=2, here=2),
        "4.0 GB to train it in 2 ranks), and 4.0 GB of 4.0 GB are free",
        "train in one process with --ranks 1",
    ),
    (
        plan_with(model={"size": "tiny", "context": 65_536}, inner={"step_tokens": 65_536}),
        replace(GPU, device_free=GB // 4, device_total=GB // 4),
        "on cuda:0, and 250.0 MB of 250.0 MB are free",
        f"{ORGANISER}model.context 32768",
    ),
    (
        llama(weights="loaded"),
        replace(GPU, device_free=8 * GB, device_total=8 * GB),
        "on cuda:0, and 8.0 GB of 8.0 GB are free",
        f"{ORGANISER}LoRA adapters (model.lora_rank 8)",
    ),
]


@pytest.mark.parametrize(("plan", "room", "found", "remedy"), CASES)
def test_what_does_not_fit_is_refused_with_what_would(plan: RunPlan, room: Room, found: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(found)) as caught:
        check_memory(plan, room)
    assert remedy in str(caught.value)


def test_the_refusal_reads_as_one_sentence() -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory(base(), replace(CPU, host_free=GB, host_total=GB))
    assert str(caught.value) == (
        "this run needs at least 3.1 GB of memory on this machine (1.1 GB to hold the shared model of 125,169,408 "
        "parameters, 2.0 GB to train it), and 1.0 GB of 1.0 GB are free; ask the organiser for a run with model.size "
        '"small"'
    )


def test_a_run_that_may_just_fit_is_not_refused_and_its_trainer_is_warned() -> None:
    tight = replace(CPU, host_free=int(3.5 * GB))
    check_memory(base(), tight)
    assert explain_tight(base(), tight, 4) == (
        "memory may run out: training is likely to need 8.8 GB on this machine, and 3.5 GB are free; if it does, "
        "close other programs, or set --windows-at-once 1 or --recompute always"
    )
    assert explain_tight(base(), CPU, 4) is None
    small_gpu = replace(GPU, device_free=int(2.1 * GB))
    check_memory(base(), small_gpu)
    text = r"likely to need 3.3 GB on cuda:0, and 2.1 GB are free; if it does, close other programs$"
    assert re.search(text, explain_tight(base(), small_gpu, 1) or "")
