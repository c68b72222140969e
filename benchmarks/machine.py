"""Description of the machine that figures were measured on: hardware and software, but no names and no paths."""

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
    """Return the description of this machine for a results document. Call it before measuring.

    `load` is the kernel's load average of the last minute: other work on the machine.
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
    """Return the name of the first processor in the text of `/proc/cpuinfo`, with family and model if given.

    Virtual machines often report only a short name that does not identify the generation. Empty without a name.
    """
    told: dict[str, str] = {}
    for line in cpu_text.splitlines():
        field, _, value = line.partition(":")
        told.setdefault(field.strip(), value.strip())
    name = told.get("model name", "")
    if name and "cpu family" in told and "model" in told:
        return f"{name} (family {told['cpu family']}, model {told['model']})"
    return name
