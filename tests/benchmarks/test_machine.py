"""The machine is named by what it is, never by whose it is."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest

from benchmarks.machine import describe_machine, processor_named


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel name\t: Other\n",
            "AMD EPYC (family 25, model 17)",
        ),
        ("processor\t: 0\nmodel name\t: ARMv8 Processor rev 3 (v8l)\n", "ARMv8 Processor rev 3 (v8l)"),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", ""),
        ("", ""),
    ],
)
def test_a_processor_is_named_as_the_kernel_names_its_first(text: str, name: str) -> None:
    assert processor_named(text) == name


def test_a_machine_is_told_in_full() -> None:
    machine = describe_machine()
    assert list(machine) == "processor architecture cores memory_gib load kernel python torch date".split()
    assert machine["cores"] >= 1
    assert machine["memory_gib"] > 0.0
    assert machine["python"] == platform.python_version()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", machine["date"])


def test_nobody_is_named() -> None:
    machine = describe_machine()
    machine.pop("processor")  # as its maker named it
    assert "/" not in json.dumps(machine)
    assert {platform.node(), Path.home().name} & set(map(str, machine.values())) == set()
