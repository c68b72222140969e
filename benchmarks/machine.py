"""Which machine figures were taken on: what it is made of and what runs on it, but nobody's names and no paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

_CPU_FILE = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, Any]:
    """Return what a document of figures says of its machine; to be called before anything is measured.

    `load` is the kernel's mean of the minute before: what other work there was beside.
    """
    return {
        "processor": processor_named(_CPU_FILE.read_text(encoding="utf-8")) if _CPU_FILE.is_file() else "",
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "kernel": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def processor_named(cpu_text: str) -> str:
    """Return the name of the first processor in the text of `/proc/cpuinfo`, with its family and model if told.

    Virtual machines often tell a short name only, by which generations cannot be told apart. Empty if there is none.
    """
    told: dict[str, str] = {}
    for line in cpu_text.splitlines():
        field, _, value = line.partition(":")
        told.setdefault(field.strip(), value.strip())
    name = told.get("model name", "")
    if name and "cpu family" in told and "model" in told:
        return f"{name} (family {told['cpu family']}, model {told['model']})"
    return name
