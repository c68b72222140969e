"""`p2p-diloco report`: what helps to understand a field trial, in one zip file that its owner looks at and sends.

It reads the files in the state directory as they are, beside a running peer too, and a bounded part of each. What
cannot be read is named in the report. Texts are redacted (`redaction`); keys and checkpoints are never opened.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import io
import json
import os
import platform
import socket
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from p2p_diloco.app.cli.redaction import Redactor, names_in
from p2p_diloco.config.manifest import MAX_MANIFEST_BYTES, RunManifest, decode_kept_manifest
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.memory.available import free_memory, total_memory
from p2p_diloco.rate import counted
from p2p_diloco.status.event_log import EVENTS_FILE, OLD_EVENTS_FILE, TOPICS
from p2p_diloco.status.history import read_points, read_rounds
from p2p_diloco.status.owner_requests import is_running
from p2p_diloco.status.status_file import STATUS_FILE, PeerStatus, read_status, status_document
from p2p_diloco.storage.identity import read_name
from p2p_diloco.storage.member_files import MEMBERS_FILE, read_members
from p2p_diloco.storage.run_folder import MANIFEST_FILE
from p2p_diloco.wording import format_bytes

MOST_EVENT_BYTES = 5_000_000
"""Size of the newest events that a report reads: about a day, redacted within seconds."""
MOST_ROWS = 2_000
"""Number of the newest points and rounds of the history."""
MOST_RUNS = 4
PACKAGES = ("torch", "hivemind", "numpy", "numba", "pydantic", "uvloop")
_PATH_SETTINGS = ("data", "model", "state_directory", "identity_path", "tensorboard")
_UNSENT_KEYS = ("config", "tensors", "ignored", "source")
"""Keys of the model in a manifest that hold names of the organiser's."""
_PRIVATE_SETTINGS = ("public_name", *_PATH_SETTINGS)

_README = """\
Report of p2p-diloco, made {made} UTC on the machine of {peer}. Look at it before you send it.

Files
  status.json      the latest status of this peer{running}
  events.jsonl     its newest events, one a line: {events}
  history.json     the newest points of its curves, and rounds, as rows
  runs.json        the settings of its runs, without names
  settings.json    the settings of this machine as the command `report` got them, and the limits in force
  machine.json     versions, platform, processor, memory, disk and clocks of this machine
  pseudonyms.json  kinds of the addresses that were replaced, and how many things of each kind were

Replaced, by the same pseudonym for the same thing in all files
  addresses, host names and web addresses (address-1), peer ids, whole or shortened (peer-1), names of machines
  (machine-1), of users and mail addresses (user-1), of runs (run-1) and members (member-1), paths (path-1), invites
  (invite-1), and long texts that may be keys (secret-1). Digests became shorter ones, which are equal in the reports
  of two machines if the digests are.

Not in it
  keys, signatures, checkpoints, the training text, logs of other programs

Names that appear nowhere but within a sentence, and follow no pattern, cannot be recognised: read events.jsonl.
{problems}"""


def write_report(folder: Path, into: Path | None, settings: PeerSettings) -> int:
    """Write the report about the peer of a state directory, and print where it is and what is in it.

    Raises:
        ConfigError: no peer has run there, or the file exists or cannot be written.
    """
    path = into or Path(time.strftime("p2p-diloco-report-%Y%m%d-%H%M%S.zip", time.gmtime()))
    if path.exists():
        raise ConfigError(f"{path} exists; name a new file with --into")
    files = collect(folder, settings)
    packed = pack(files)
    try:
        with path.open("xb") as file:
            file.write(packed)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file with --into") from None
    print(f"{path.absolute()}: {format_bytes(len(packed))}")
    for name, content in files.items():
        print(f"  {name:<16} {format_bytes(len(content.encode()))}")
    print("look at it before you send it: README.txt tells what was replaced")
    return 0


def pack(files: Mapping[str, str]) -> bytes:
    """Return a zip file, with times that say nothing about this machine."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def collect(folder: Path, settings: PeerSettings) -> dict[str, str]:
    """Return the files of a report by name, redacted.

    Raises:
        ConfigError: no peer has run in `folder`, or it cannot be read.
    """
    problems: list[str] = []
    status = read_status(folder)
    events, num_skipped = _events(folder, problems)
    runs = _runs(folder, problems)
    if status is None and not events and not runs:
        _check_folder(folder)
    if status is None:
        problems.append(f"{STATUS_FILE} is missing or cannot be read")
    status = status or PeerStatus()
    redactor = _taught(folder, settings, status, [run.model_dump(mode="json") for run in runs], events)

    lines = [json.dumps(_redacted(event, redactor)) for event in events]
    state = redactor.document(status_document(status))
    documents = {
        "status.json": {"running": is_running(status), **state},
        "history.json": _history(folder, status.run),
        "runs.json": [redactor.document(_without_names(run)) for run in runs],
        "settings.json": redactor.document(_settings(settings, status, redactor)),
        "machine.json": redactor.document(_machine(folder, status)),
    }
    documents["pseudonyms.json"] = {"addresses": redactor.kinds, "replaced": redactor.counts}
    readme = _README.format(
        made=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        peer=redactor.text(status.peer) or "a peer without a status",
        running=", which runs" if is_running(status) else ", which is not running",
        events=f"{counted(len(lines), 'event')}, {counted(num_skipped, 'line')} left out as unreadable",
        problems="".join(f"\nProblem: {redactor.text(problem)}\n" for problem in problems),
    )
    written = {name: json.dumps(document, indent=1) + "\n" for name, document in documents.items()}
    return {"README.txt": readme, "events.jsonl": "".join(f"{line}\n" for line in lines), **written}


def _check_folder(folder: Path) -> None:
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; name the folder of a peer's state with --state-directory")
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"cannot read {folder}; run this as the user of the peer")
    if folder.is_dir():
        raise ConfigError(f"{folder} has no status, events or manifest of a peer; name another with --state-directory")
    raise ConfigError(f"no peer has run with the state directory {folder}; name another with --state-directory")


def _taught(
    folder: Path, settings: PeerSettings, status: PeerStatus, runs: Sequence[Any], events: Sequence[Any]
) -> Redactor:
    """Return a redactor that knows the names of this machine, its user, its peer and its runs."""
    redactor = Redactor()
    for text in (status.peer, *(line.peer for line in status.peers), json.dumps(runs), json.dumps(events)):
        redactor.learn_peers(text)
    redactor.learn("run", status.run_name, status.run, status.run[:16])
    for name in names_in([*runs]):
        redactor.learn("run", name)
    for name in _member_names(folder, status):
        redactor.learn("member", name)
    for name in _user_names():
        redactor.learn("user", name)
    host = socket.gethostname()
    redactor.learn("machine", host, host.partition(".")[0], platform.node(), settings.public_name or "")
    for place in (folder.absolute(), folder.resolve(), Path.home(), Path.cwd()):
        if len(place.parts) > 1:
            redactor.learn("path", str(place))
    for key in _PATH_SETTINGS:
        if text := str(getattr(settings, key) or ""):
            redactor.learn("path", text)
    for run in runs:
        redactor.learn("path", *(text for text in (run["data"]["path"],) if text != "stdlib"))
    return redactor


def _member_names(folder: Path, status: PeerStatus) -> set[str]:
    """Return the names of this peer, of those in its status, and of all that it remembers."""
    found = [status.name, *(line.name for line in status.peers)]
    with suppress(StateError):
        found.append(read_name(folder))
    for place in folder.glob(f"*/{MEMBERS_FILE}"):
        with suppress(StateError):
            found += [record.name for record in read_members(place.parent).records]
    return set(filter(None, found))


def _user_names() -> Iterator[str]:
    yield Path.home().name
    with suppress(OSError, KeyError, ImportError):
        yield getpass.getuser()
    yield from (os.environ[name] for name in ("USER", "LOGNAME", "SUDO_USER") if name in os.environ)
    with suppress(ImportError, KeyError):
        import pwd

        yield from (part for part in pwd.getpwuid(os.getuid()).pw_gecos.split(",") if len(part) > 2)


def _events(folder: Path, problems: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the newest events of both files, oldest first, and the number of unreadable lines."""
    parts: list[bytes] = []
    room, seen = MOST_EVENT_BYTES, set()
    for name in (EVENTS_FILE, OLD_EVENTS_FILE):
        try:
            with (folder / name).open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino in seen or room <= 0:  # the file was renamed meanwhile
                    continue
                seen.add(found.st_ino)
                is_cut = found.st_size > room
                file.seek(max(0, found.st_size - room))
                content = file.read(room)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        room -= len(content)
        parts.insert(0, content.partition(b"\n")[2] if is_cut else content)
    events, num_skipped = [], 0
    for line in b"\n".join(parts).splitlines():
        event = _event_of(line)
        if event is not None:
            events.append(event)
        elif line.strip():
            num_skipped += 1
    return events, num_skipped


def _event_of(line: bytes) -> dict[str, Any] | None:
    """Return the fields of one event; None if it is none, such as a line that was cut off."""
    try:
        document = json.loads(line)
        figures = dict(document.get("figures", {}))
        event = {"time": float(document["time"]), "topic": str(document["topic"]), "text": str(document["text"])}
        return event | {"figures": {str(k): v for k, v in figures.items() if isinstance(v, float | int | str)}}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _redacted(event: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    topic = event["topic"]
    return {**redactor.document(event), "topic": topic if topic in TOPICS else redactor.text(topic)}


def _runs(folder: Path, problems: list[str]) -> list[RunManifest]:
    """Return the manifests of the newest runs in the state directory."""
    found: list[tuple[float, Path]] = []
    for path in folder.glob(f"*/{MANIFEST_FILE}"):
        with suppress(OSError):
            found.append((path.stat().st_mtime, path))
    runs = []
    for _, path in sorted(found, reverse=True)[:MOST_RUNS]:
        try:
            with path.open("rb") as file:
                encoded = file.read(MAX_MANIFEST_BYTES + 1)
            runs.append(decode_kept_manifest(encoded, path, "move it away").manifest)
        except StateError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
    return runs


def _without_names(run: RunManifest) -> dict[str, Any]:
    """Return the settings of a run; a model of the organiser's is only named by its kind."""
    document = run.model_dump(mode="json")
    model = {key: value for key, value in document["model"].items() if key not in _UNSENT_KEYS}
    kinds = {"source": run.model.source.partition(":")[0], "num_tensors": len(run.model.tensors)}
    return {**document, "model": model | kinds}


def _settings(settings: PeerSettings, status: PeerStatus, redactor: Redactor) -> dict[str, Any]:
    document = settings.model_dump(mode="json")
    for key in _PRIVATE_SETTINGS:
        if document[key] is not None:
            document[key] = redactor.pseudonym("path" if key in _PATH_SETTINGS else "machine", str(document[key]))
    return {"settings": document, "limits_in_force": dict(status.limits)}


def _history(folder: Path, run: str) -> dict[str, Any]:
    points, rounds = read_points(folder, run)[-MOST_ROWS:], read_rounds(folder, run, MOST_ROWS)
    return {
        name: {"columns": list(asdict(rows[0])), "rows": [list(asdict(row).values()) for row in rows]} if rows else {}
        for name, rows in (("points", points), ("rounds", rounds))
    }


def _machine(folder: Path, status: PeerStatus) -> dict[str, Any]:
    now = time.time()
    disk: Any = None
    with suppress(OSError):
        disk = psutil.disk_usage(str(folder))
    return {
        "versions": {name: _version(name) for name in ("p2p-diloco", *PACKAGES)},
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": {"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "libc": " ".join(platform.libc_ver()),
        "is_wsl": "microsoft" in platform.release().lower(),
        "in_container": any(Path(name).exists() for name in ("/.dockerenv", "/run/.containerenv")),
        "cores": {"logical": psutil.cpu_count(), "physical": psutil.cpu_count(logical=False)},
        "load": os.getloadavg(),
        "memory": {"total": total_memory(), "free": free_memory()},
        "disk_of_state": None if disk is None else {"total": disk.total, "free": disk.free},
        "clocks": {
            "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
            "unix": now,
            "seconds_since_boot": now - psutil.boot_time(),
            "local_minutes_ahead_of_utc": time.localtime(now).tm_gmtoff // 60,
            "seconds_since_status": now - status.updated if status.updated else None,
        },
        "byte_order": sys.byteorder,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
