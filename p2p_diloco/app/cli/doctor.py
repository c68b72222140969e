"""`p2p-diloco doctor`: check whether this machine can take part in a run.

A check takes facts and returns a finding. Facts are gathered concurrently, each within a time limit. Nothing is joined,
and nothing is changed: what the libp2p daemon needs lies in a temporary folder.
"""

from __future__ import annotations

import asyncio
import enum
import importlib.metadata
import ipaddress
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
import threading
import time
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias, TypeVar

import psutil

import p2p_diloco
from p2p_diloco.config.invite import Invite, parse_invite
from p2p_diloco.config.key_file import read_key_file
from p2p_diloco.config.manifest import decode_kept_manifest
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError, NetworkError, P2PDilocoError, StateError, clean_text
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.memory.available import free_memory, total_memory
from p2p_diloco.rate import counted
from p2p_diloco.storage.identity import kept_port, lock_identity
from p2p_diloco.storage.run_folder import ARCHIVE_FOLDER, BOOTSTRAP_FOLDER, MANIFEST_FILE
from p2p_diloco.transport.p2pd import MOST_DAEMON_FILES, check_ports_are_free
from p2p_diloco.wording import format_bytes

FOUND_FAILURE = 7
"""Exit code of `doctor` if a check failed."""
LIMIT_SECONDS, IMPORT_SECONDS = 8.0, 60.0
"""Time limits of a check, and of one that imports PyTorch or hivemind from a disk that may be slow."""
FIRST_SECONDS = 0.5
"""Head start of the dials, whose milliseconds the imports would spoil."""
LEAST_PYTHON = (3, 11)
BUILT_YEAR = 2026
LEAST_MEMORY, GOOD_MEMORY = 500e6, 2e9
LEAST_DISK, GOOD_DISK = 100e6, 2e9
LEAST_FILES = 256
_SHARED_BY_PROVIDER = ipaddress.ip_network("100.64.0.0/10")
_VPN = re.compile(r"(tun|tap|wg|utun|tailscale|zt|nordlynx|proton|ipsec|ppp)", re.IGNORECASE)
_SOMEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses: choosing a route to them sends no packet."""
_NAMED_PACKAGES = ("torch", "hivemind")

Value = TypeVar("Value")


class Result(enum.StrEnum):
    """The result of a check; only a failure keeps this machine out."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The finding of one check: a short name, a sentence, and what to do unless all is well."""

    result: Result
    name: str
    finding: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return clean_text(f"{self.result:<8} {self.name:<10} {self.finding}{remedy}")


def ok(name: str, finding: str) -> Finding:
    return Finding(result=Result.OK, name=name, finding=finding)


def warning(name: str, finding: str, remedy: str) -> Finding:
    return Finding(result=Result.WARNING, name=name, finding=finding, remedy=remedy)


def failure(name: str, finding: str, remedy: str) -> Finding:
    return Finding(result=Result.FAILURE, name=name, finding=finding, remedy=remedy)


def failure_of(name: str, error: Exception) -> Finding:
    """Return the failure that an error means; our own errors end in what to do."""
    if isinstance(error, P2PDilocoError):
        text, found, remedy = clean_text(str(error)).rpartition("; ")
        return failure(name, text, remedy) if found else failure(name, remedy, "see `p2p-diloco doctor --help`")
    kind = type(error).__name__
    return failure(name, clean_text(f"the check itself failed ({kind}: {error})"), "please report this line")


def run_doctor(invite: str | None, settings: PeerSettings, *, as_json: bool) -> int:
    """Run all checks, print a line for each or one JSON document, and return the exit code."""

    def show(finding: Finding) -> None:
        if not as_json:
            print(finding, flush=True)

    findings = asyncio.run(examine(invite, settings, show))
    counts = {result: sum(finding.result is result for finding in findings) for result in Result}
    if as_json:
        totals = {"failures": counts[Result.FAILURE], "warnings": counts[Result.WARNING]}
        print(json.dumps({**totals, "checks": [asdict(finding) for finding in findings]}, indent=2))
    else:
        failures, warnings = (counted(counts[result], result) for result in (Result.FAILURE, Result.WARNING))
        print(f"{counted(len(findings), 'check')}: {failures}, {warnings}")
    return FOUND_FAILURE if counts[Result.FAILURE] else 0


Started: TypeAlias = asyncio.Future[Sequence[Finding]]
"""A check that runs, with its findings."""


async def examine(invite: str | None, settings: PeerSettings, show: Callable[[Finding], None]) -> list[Finding]:
    """Run the checks concurrently; each finding is shown as soon as those before it are there."""
    from p2p_diloco.app.cli.doctor_network import RunChecks

    parsed, read = _parsed(invite)
    port = await _port_in_time(settings)
    dials = RunChecks(parsed, settings, port.addresses if not port.problem else port.any_port)
    dialling = asyncio.ensure_future(dials.dial(FIRST_SECONDS))
    await asyncio.sleep(0)  # they have begun

    async def after_dials(checks: Awaitable[Sequence[Finding]]) -> Sequence[Finding]:
        await asyncio.shield(dialling)
        return await checks

    identity = in_thread(lambda: _identity_facts(settings))
    local: list[tuple[str, Callable[[], Finding]]] = [
        ("python", lambda: check_python(sys.version_info[:3], platform.platform(terse=True))),
        ("packages", lambda: check_packages(_package_facts())),
        ("processor", lambda: check_processor(_num_cores(), os.getloadavg()[0], settings.threads)),
        ("memory", lambda: check_memory(free_memory(), total_memory())),
        ("files", lambda: check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
        ("clock", lambda: check_clock(datetime.fromtimestamp(time.time(), UTC).year)),
        ("state", lambda: check_state(folder_facts(settings.state_directory))),
        ("disk", lambda: check_disk(folder_facts(settings.state_directory), settings.disk_free or 0.0)),
        ("runs", lambda: check_runs(settings.state_directory, _kept_runs(settings.state_directory))),
        ("network", lambda: check_network(_outgoing())),
    ]

    async def check_own_identity() -> Sequence[Finding]:
        facts = await asyncio.shield(identity)
        return [check_identity(facts), check_port(port, is_own=facts.is_used)]

    def start(name: str, check: Awaitable[Sequence[Finding]], limit_seconds: float) -> Started:
        return asyncio.ensure_future(guarded(name, check, limit_seconds))

    findings: list[Finding] = []

    async def take(*checks: Started) -> None:
        for check in checks:
            for finding in await check:
                findings.append(finding)
                show(finding)

    here = [start(name, each(judge), LIMIT_SECONDS) for name, judge in local]
    here.append(start("identity", check_own_identity(), LIMIT_SECONDS))
    device = each(lambda: _device_finding(settings.device, settings.threads))
    here.append(start("device", after_dials(device), IMPORT_SECONDS))
    there = [start("address", dials.check_addresses(), LIMIT_SECONDS)]
    there.append(start("daemon", after_dials(dials.check_swarm()), IMPORT_SECONDS))
    await take(*here)
    if invite is not None:
        findings.append(read)
        show(read)
    await take(*there)
    me = identity.result().peer if identity.done() and identity.exception() is None else None
    await take(*[start(name, each(judge), limit) for name, judge, limit in dials.run_checks(me)])
    return findings


async def guarded(name: str, check: Awaitable[Sequence[Finding]], limit_seconds: float) -> Sequence[Finding]:
    """Return the findings of a check; one that raises or takes too long has failed."""
    try:
        async with asyncio.timeout(limit_seconds):
            return await check
    except TimeoutError:
        return [failure(name, f"no result within {limit_seconds:.0f} s", "is this machine or its disk overloaded?")]
    except Exception as error:
        return [failure_of(name, error)]


async def each(judge: Callable[[], Finding]) -> Sequence[Finding]:
    """Run a check that may block in a thread of its own."""
    return [await in_thread(judge)]


def in_thread(call: Callable[[], Value]) -> asyncio.Future[Value]:
    """Call a function in a thread that does not keep the process from ending, as a disk that hangs would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Value] = loop.create_future()

    def finish(set_result: Callable[[], None]) -> None:
        if not future.done():
            set_result()

    def work() -> None:
        try:
            value = call()
        except Exception as error:
            failed = error  # the name `error` is gone after this block
            done = lambda: future.set_exception(failed)  # noqa: E731
        else:
            done = lambda: future.set_result(value)  # noqa: E731
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, done)

    threading.Thread(target=work, name="doctor", daemon=True).start()
    return future


# -- checks of this machine


def check_python(version: tuple[int, ...], system: str) -> Finding:
    text = f"{'.'.join(map(str, version))} on {system}"
    if version < LEAST_PYTHON:
        return failure("python", text, f"install Python {'.'.join(map(str, LEAST_PYTHON))} or newer")
    return ok("python", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFacts:
    """The version of this package, and what it requires (such as `torch>=2.10`), each with the installed version."""

    own: str
    required: tuple[tuple[str, str | None], ...]


def check_packages(facts: PackageFacts) -> Finding:
    wrong = [
        f"{line} is missing" if version is None else f"{line} is required, {version} is installed"
        for line, version in facts.required
        if version is None or not is_allowed(version, line)
    ]
    if wrong:
        return failure("packages", "; ".join(wrong), "install this package again, into a new environment")
    versions = {_package_name(line): version for line, version in facts.required}
    named = [f"{name} {versions[name]}" for name in _NAMED_PACKAGES if name in versions]
    return ok("packages", ", ".join([f"p2p-diloco {facts.own}", *named, f"all {len(versions)} required ones"]))


def is_allowed(version: str, requirement: str) -> bool:
    """Return whether a version is within the bounds of a requirement, such as `pydantic>=2.7,<3`."""
    compared = {"==": (0,), ">=": (0, 1), "<=": (0, -1), "<": (-1,), ">": (1,)}
    for operator, bound in re.findall(r"(==|>=|<=|<|>)\s*([\d.]+)", requirement):
        one, other = _release(version), _release(bound)
        if (one > other) - (one < other) not in compared[operator]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else []
    return tuple((parts + [0] * 4)[:4])


def _package_name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0]


def check_processor(cores: int, load: float, threads: int | None) -> Finding:
    text = f"{counted(cores, 'core')}, load {load:.1f}"
    if threads is not None and threads > cores:
        return warning("processor", f"{text}, {threads} threads to train", f"set --threads {cores} or fewer")
    if load > cores:
        return warning(
            "processor", text, "other programs take part of each step; end them, or train when they are done"
        )
    return ok("processor", text)


def check_memory(free: float, total: float) -> Finding:
    text, remedy = f"{format_bytes(free)} of {format_bytes(total)} free", "close other programs"
    if free < LEAST_MEMORY:
        return failure("memory", f"{text}, and a peer needs {format_bytes(LEAST_MEMORY)} besides its model", remedy)
    return (
        warning("memory", f"{text}, enough for small models only", remedy) if free < GOOD_MEMORY else ok("memory", text)
    )


def check_files(hard_limit: int) -> Finding:
    if hard_limit == resource.RLIM_INFINITY:
        return ok("files", "no limit of open files")
    if hard_limit >= MOST_DAEMON_FILES:
        return ok("files", f"at most {hard_limit:,} open files")
    text = f"at most {hard_limit:,} open files; a peer of a large run needs {MOST_DAEMON_FILES:,}"
    result = failure if hard_limit < LEAST_FILES else warning
    return result("files", text, f"raise the hard limit: ulimit -Hn {MOST_DAEMON_FILES}")


def check_clock(year: int) -> Finding:
    if year < BUILT_YEAR:
        return failure(
            "clock", f"the clock shows the year {year}, and this version is of {BUILT_YEAR}", "set the clock"
        )
    return ok("clock", f"the clock shows the year {year}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """The state directory, or the nearest folder above it that exists.

    Attributes:
        folder: the state directory; `place` is what exists of its path.
        exists: whether it exists; `is_file`: whether something else has its name.
        can_write: whether this user may write there.
        free, total: bytes of the disk; `free_nodes`: files that it can still hold.
    """

    folder: Path
    place: Path
    exists: bool
    is_file: bool
    can_write: bool
    free: int
    total: int
    free_nodes: int = 1


def check_state(facts: FolderFacts) -> Finding:
    elsewhere = "choose another place with --state-directory"
    if facts.is_file:
        return failure("state", f"{facts.place} is a file", elsewhere)
    if not facts.can_write:
        return failure("state", f"cannot write to {facts.place}", f"give this user write access, or {elsewhere}")
    return ok("state", f"{facts.folder} {'exists' if facts.exists else 'can be created'} and can be written")


def check_disk(facts: FolderFacts, kept_free: float) -> Finding:
    free = facts.free - kept_free
    text = f"{format_bytes(facts.free)} of {format_bytes(facts.total)} free at {facts.place}"
    text += f", of which {format_bytes(kept_free)} are to stay free" if kept_free else ""
    remedy = "free some space, or choose another place with --state-directory"
    if not facts.free_nodes:
        return failure("disk", f"{text}, but it can hold no more files", "remove files, or choose another disk")
    if free < LEAST_DISK:
        return failure("disk", text, remedy)
    return warning("disk", f"{text}, enough for small models only", remedy) if free < GOOD_DISK else ok("disk", text)


def check_runs(folder: Path, runs: Sequence[str | None]) -> Finding:
    """Check the runs of a state directory; each is None, or the reason why this version cannot read it."""
    wrong = [reason for reason in runs if reason is not None]
    if not wrong:
        return ok("runs", f"{counted(len(runs), 'earlier run')} in {folder}" if runs else "no earlier runs")
    text, _, remedy = wrong[0].rpartition("; ")
    return warning("runs", f"{len(wrong)} of {counted(len(runs), 'earlier run')} cannot be read: {text}", remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityFacts:
    """The identity: its peer, None if there is none yet; why it cannot be used; whether a process uses it."""

    peer: PeerId | None = None
    problem: str = ""
    is_used: bool = False


def check_identity(facts: IdentityFacts) -> Finding:
    if facts.problem:
        return failure_of("identity", ConfigError(facts.problem))
    if facts.peer is None:
        return ok("identity", "none yet; the first start makes one")
    return ok("identity", f"{short_peer_id(facts.peer)}, readable by this user only, and not in use")


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """The addresses to listen on, whether the user named the port, and why it cannot be listened on; empty: it can."""

    addresses: tuple[str, ...]
    is_named: bool = False
    problem: str = ""

    @property
    def any_port(self) -> tuple[str, ...]:
        """The same addresses with a port that the system chooses."""
        return tuple(re.sub(r"/tcp/\d+$", "/tcp/0", address) for address in self.addresses)


def check_port(facts: PortFacts, *, is_own: bool) -> Finding:
    if not facts.addresses:
        return ok("port", "this peer only dials out, as configured")
    if not facts.problem:
        listening = ", ".join(facts.addresses)
        return ok("port", f"can listen on {listening}{' (any free port)' if listening.endswith('/tcp/0') else ''}")
    if is_own:
        return ok("port", "in use by the peer that runs with this state directory")
    if facts.is_named:
        return failure_of("port", NetworkError(facts.problem))
    text = facts.problem.partition("; ")[0]
    return warning("port", text, "stop that program, or the peer takes another port, which the router must forward")


def check_network(outgoing: Sequence[tuple[str, str]]) -> Finding:
    """Check how this machine leaves its network.

    Args:
        outgoing: address and interface of outgoing packets, for IPv4 and IPv6, as far as there is a route.
    """
    if not outgoing:
        return warning("network", "no route to other networks", "connect this machine, unless all peers are on its own")
    text, hidden = [], ""
    for host, interface in outgoing:
        address = ipaddress.ip_address(host)
        kind = "public" if address.is_global else "private, behind a router"
        if address.version == 4 and address in _SHARED_BY_PROVIDER:
            kind = hidden = "shared by a provider (CGNAT) or a VPN"
        elif _VPN.match(interface):
            kind = hidden = "a VPN's"
        text.append(f"IPv{address.version} address {host} ({interface}) is {kind}")
    if len(outgoing) == 1:
        text.append(f"no IPv{4 if ':' in outgoing[0][0] else 6}")
    is_public = any(ipaddress.ip_address(host).is_global and not _VPN.match(place) for host, place in outgoing)
    if hidden and not is_public:
        remedy = "the peer trains, but others cannot dial it there; end the VPN, or accept it"
        return warning("network", ", ".join(text), remedy)
    return ok("network", ", ".join(text))


# -- facts


def _parsed(invite: str | None) -> tuple[Invite | None, Finding]:
    if invite is None:
        return None, ok("invite", "none")
    try:
        parsed = parse_invite(invite)
    except Exception as error:
        return None, failure_of("invite", error)
    text = f"run {parsed.run.hex()[:16]}, {counted(len(parsed.bootstraps), 'place')} to dial"
    if parsed.complaints:
        return parsed, warning("invite", f"{text}; {parsed.complaints[0]}", "ask for a new invite")
    return parsed, ok("invite", text)


def _package_facts() -> PackageFacts:
    try:
        own = importlib.metadata.version("p2p-diloco")
        lines = importlib.metadata.requires("p2p-diloco") or []
    except importlib.metadata.PackageNotFoundError:  # run from its source folder
        path = Path(p2p_diloco.__file__).parent.parent / "pyproject.toml"
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        own, lines = project["version"], project["dependencies"]
    required = [line for line in lines if ";" not in line]  # the others belong to extras
    return PackageFacts(own=own, required=tuple((line, _installed(_package_name(line))) for line in required))


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def folder_facts(folder: Path) -> FolderFacts:
    """Look at the disk of a folder that need not exist."""
    place = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    usage, system = shutil.disk_usage(place), os.statvfs(place)
    return FolderFacts(
        folder=folder,
        place=place,
        exists=folder.is_dir(),
        is_file=not place.is_dir(),
        can_write=os.access(place, os.W_OK | os.X_OK),
        free=usage.free,
        total=usage.total,
        free_nodes=system.f_favail if system.f_files else 1,
    )


def _kept_runs(state: Path) -> list[str | None]:
    found: list[str | None] = []
    for folder in (state, state / BOOTSTRAP_FOLDER, state / ARCHIVE_FOLDER):
        for path in sorted(folder.glob(f"*/{MANIFEST_FILE}")):
            try:
                decode_kept_manifest(path.read_bytes(), path, "move it away")
                found.append(None)
            except StateError as error:
                found.append(str(error))
    return found


def _identity_facts(settings: PeerSettings) -> IdentityFacts:
    path = settings.identity_file
    if not path.exists():
        return IdentityFacts()
    try:
        peer = read_key_file(path).peer
    except ConfigError as error:
        return IdentityFacts(problem=str(error))
    try:
        with lock_identity(path):
            return IdentityFacts(peer=peer)
    except ConfigError as error:
        return IdentityFacts(peer=peer, problem=str(error), is_used=True)


def _port_facts(settings: PeerSettings) -> PortFacts:
    kept = kept_port(settings.state_directory) or 0
    addresses = tuple(re.sub(r"/tcp/0$", f"/tcp/{kept}", address) for address in settings.listen_addresses(kept))
    is_named = bool(settings.port or settings.host_maddrs)
    try:
        check_ports_are_free(addresses)
    except (P2PDilocoError, OSError) as error:
        return PortFacts(addresses=addresses, is_named=is_named, problem=str(error))
    return PortFacts(addresses=addresses, is_named=is_named)


async def _port_in_time(settings: PeerSettings) -> PortFacts:
    """Look for the port; the state directory may be on a disk that hangs."""
    try:
        return await asyncio.wait_for(in_thread(lambda: _port_facts(settings)), LIMIT_SECONDS)
    except TimeoutError:
        problem = f"no result within {LIMIT_SECONDS:.0f} s; is the disk of the state directory overloaded?"
        return PortFacts(addresses=settings.listen_addresses(0), is_named=True, problem=problem)


def _device_finding(name: str, threads: int | None) -> Finding:
    import torch

    from p2p_diloco.app.training.inner_loop import choose_device

    device = choose_device(name)
    text = f"{device}, PyTorch {torch.__version__}"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        model = torch.cuda.get_device_name(device)
        return ok("device", f"{text}, {model}, {format_bytes(free)} of {format_bytes(total)} free")
    return ok("device", f"{text}, {counted(threads or torch.get_num_threads(), 'thread')}")


def _outgoing() -> list[tuple[str, str]]:
    interfaces = {
        address.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
    }
    found = []
    for family, somewhere in _SOMEWHERE.items():
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))
            host = str(probe.getsockname()[0]).partition("%")[0]
            found.append((host, interfaces.get(host, "?")))
    return found
