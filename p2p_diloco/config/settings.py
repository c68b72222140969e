"""Settings: everything that is private to one machine. They are never sent to other peers.

Each key is looked up in four layers, in this order: flag, environment (`P2P_DILOCO_PORT=…`), file (`@peer.toml`),
default. An unknown key in any layer is an error.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from platformdirs import user_data_path
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from p2p_diloco.config.invite import parse_host_address, parse_peer_address, port_of
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import canonical_key
from p2p_diloco.config.toml_document import (
    Document,
    given_keys,
    known_keys,
    nearest_key,
    parse_value,
    read_toml,
    validated,
)
from p2p_diloco.errors import ConfigError
from p2p_diloco.rate import format_rate, parse_bytes, parse_rate
from p2p_diloco.wording import format_bytes

ENVIRONMENT_PREFIX = "P2P_DILOCO_"
BOOTSTRAP_PORT = 31337
IDENTITY_FILE = "identity.key"
DAY_MINUTES = 24 * 60
DAY_NAMES = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
SLOWEST_CAP = 128e3
"""Bits per second; below that, a frame takes longer than peers wait for it."""
LEAST_AMOUNT = 1e6
"""Bytes; smaller quotas and amounts of disk are typing errors."""

LIMITS = (
    "max_upload",
    "max_download",
    "monthly_quota",
    "hours",
    "days",
    "on_battery",
    "disk_cap",
    "disk_free",
    "nice",
    "gpu_duty",
)
"""Settings that limit what a peer uses of its machine; `p2p-diloco limits` changes them while the peer runs."""
NO_LIMIT = "none"
"""The text that removes a limit."""
_CAPS = ("max_upload", "max_download")
_AMOUNTS = ("monthly_quota", "disk_cap", "disk_free")

_TIME = r"([01]\d|2[0-3]):([0-5]\d)"
_HOURS = re.compile(rf"{_TIME}-{_TIME}", re.ASCII)
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?", re.ASCII)
_FLAG = re.compile(r"(?<![\w-])--[a-z]+(-[a-z]+)*(?!\w|-|\.\w)")
_HOST_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,62})(\.[a-z0-9]([a-z0-9-]{0,62}))*\.?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """A part of every day, in minutes since midnight; it crosses midnight if it ends before it begins."""

    begin: int
    end: int

    def __str__(self) -> str:
        return "-".join(f"{minutes // 60:02d}:{minutes % 60:02d}" for minutes in (self.begin, self.end))

    @property
    def minutes(self) -> int:
        return (self.end - self.begin) % DAY_MINUTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Days:
    """Days of the week; Monday is 0."""

    numbers: frozenset[int]

    def __str__(self) -> str:
        return ",".join(DAY_NAMES[number] for number in sorted(self.numbers))


def parse_hours(text: str, name: str) -> Hours:
    """Parse `22:00-07:00`; errors name the value `name`.

    Raises:
        ConfigError: these are not two different times.
    """
    found = _HOURS.fullmatch(text.replace(" ", ""))
    begin, end = (60 * int(found[place]) + int(found[place + 1]) for place in (1, 3)) if found else (0, 0)
    if begin == end:
        raise ConfigError(f"{name} is {text!r}; expected two different times of the day, such as 22:00-07:00")
    return Hours(begin=begin, end=end)


def parse_days(text: str, name: str) -> Days:
    """Parse `sat,sun` or `mon-fri`; errors name the value `name`.

    Raises:
        ConfigError: a word is not a day.
    """
    try:
        numbers = frozenset(number for part in text.lower().replace(" ", "").split(",") for number in _days_of(part))
    except ValueError:
        raise ConfigError(
            f"{name} is {text!r}; expected days of the week ({', '.join(DAY_NAMES)}), such as sat,sun or mon-fri"
        ) from None
    return Days(numbers=numbers)


def _days_of(part: str) -> Iterator[int]:
    first, dash, last = part.partition("-")
    begin = DAY_NAMES.index(first)
    end = DAY_NAMES.index(last) if dash else begin
    for place in range((end - begin) % 7 + 1):
        yield (begin + place) % 7


def _parsed(parse: Callable[[str], object]) -> Callable[[Any], Any]:
    """Return a validator that replaces a text by what `parse` makes of it."""

    def validate(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return validate


def _fast_enough(bits: float) -> float:
    if bits < SLOWEST_CAP:
        raise ValueError(
            f"{format_rate(bits)} is too slow to take part in a run; expected at least {format_rate(SLOWEST_CAP)}"
        )
    return bits


def _not_tiny(amount: float) -> float:
    if amount < LEAST_AMOUNT:
        raise ValueError(f"{format_bytes(amount)} is too little; expected at least {format_bytes(LEAST_AMOUNT)}")
    return amount


def _known_device(device: str) -> str:
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"unknown device {device!r}; expected auto, cpu, cuda, cuda:<number> or mps")
    return device


def _host_name(name: str) -> str:
    if _is_ip(name) or _HOST_NAME.fullmatch(name):
        return name
    raise ValueError(f"{name!r} is not a host name or IP address; expected one such as bootstrap.example.org")


def _addresses(parse: Callable[[str], object]) -> AfterValidator:
    return AfterValidator(lambda addresses: tuple(_parsed(parse)(address) for address in addresses))


def _switch(text: str) -> object:
    return {"1": True, "yes": True, "true": True, "0": False, "no": False, "false": False}.get(text.lower(), text)


def _split_list(value: Any) -> Any:
    """Accept several addresses in one text too, with spaces or commas between them."""
    if not isinstance(value, str | list | tuple):
        return value
    texts = [value] if isinstance(value, str) else value
    return tuple(part for text in texts for part in re.split(r"[\s,]+", str(text)) if part)


# Variables and flags are texts, so each type also takes one.
_Limit = BeforeValidator(lambda value: None if isinstance(value, str) and value.strip().lower() == NO_LIMIT else value)
_Rate = Annotated[float, AfterValidator(_fast_enough), BeforeValidator(_parsed(lambda text: parse_rate(text, "it")))]
_Amount = Annotated[float, AfterValidator(_not_tiny), BeforeValidator(_parsed(lambda text: parse_bytes(text, "it")))]
_Home = AfterValidator(lambda path: type(path)(os.path.expanduser(path)))
_Hours = Annotated[str, AfterValidator(_parsed(lambda text: str(parse_hours(text, "it"))))]
_Days = Annotated[str, AfterValidator(_parsed(lambda text: str(parse_days(text, "it"))))]
_HostAddresses = Annotated[tuple[str, ...], _addresses(parse_host_address), BeforeValidator(_split_list)]
_PeerAddresses = Annotated[
    tuple[str, ...], _addresses(lambda text: parse_peer_address(text)[0]), BeforeValidator(_split_list)
]
_Number = BeforeValidator(_parsed(parse_value))
_Switch = Annotated[bool, BeforeValidator(_parsed(_switch))]


class PeerSettings(BaseModel):
    """The settings of one machine; all have defaults, so that an invite is enough to join."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    device: Annotated[str, AfterValidator(_known_device)] = Field(
        "auto", description="device to train on: auto, cpu, cuda, cuda:<number> or mps"
    )
    threads: Annotated[int, Field(ge=1, le=4096), _Number] | None = Field(
        None, description="CPU threads that training may use"
    )
    data: Annotated[str, _Home] | None = Field(
        None, description="your copy of the training text: a file, a folder or a pattern such as 'texts/*.txt'"
    )
    model: str | None = Field(
        None,
        description="your copy of the base model that the run adapts, or the python:module:function that may run here",
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number format to compute in: auto (as run and device allow), float32, bfloat16 or float16"
    )
    windows_at_once: Annotated[int, Field(ge=1, le=2**20), _Number] | None = Field(
        None, description="pieces of text to compute at a time; fewer need less memory [default: as many as fit]"
    )
    batch: Literal["auto", "planned"] = Field(
        "auto",
        description="pieces of text in a training step: auto (suits this machine's speed) or planned (as the run says)",
    )
    recompute: Literal["auto", "always", "never"] = Field(
        "auto", description="save memory by computing parts twice: auto (if it does not fit otherwise), always or never"
    )
    ranks: Annotated[int, Field(ge=1, le=256), _Number] | None = Field(
        None, description="number of processes that train together here [default: one for each GPU]"
    )
    shards: Literal["auto", "always", "never"] = Field(
        "auto",
        description="split the model among this machine's GPUs: auto (if a copy does not fit each), always or never",
    )
    state_directory: Annotated[Path, _Home] = Field(
        default_factory=lambda: user_data_path("p2p-diloco", appauthor=False),
        strict=False,  # a text will do
        description="folder for identity and checkpoints; each peer on this machine needs its own",
    )
    keep_checkpoints: Annotated[int, Field(ge=1, le=1000), _Number] = Field(
        3, description="number of checkpoints to keep"
    )
    identity_path: Annotated[Path, _Home] | None = Field(
        None, description="key file of this peer [default: identity.key in the state directory]"
    )
    port: Annotated[int, Field(ge=0, le=65535), _Number] | None = Field(
        None, description="TCP port to listen on [default: a free one, the same at every start]"
    )
    public_name: Annotated[str, AfterValidator(_host_name)] | None = Field(
        None, description="host name or IP address under which others reach this machine"
    )
    host_maddrs: _HostAddresses = Field(
        (), description="addresses to listen on, such as /ip4/0.0.0.0/tcp/31337 [default: all]"
    )
    announce_maddrs: _HostAddresses = Field(
        (),
        description="addresses to announce, such as /ip4/203.0.113.7/tcp/31337 [default: those that it listens on]",
    )
    initial_peers: _PeerAddresses = Field(
        (), description="addresses of more peers to contact first, besides those in the invite"
    )
    dial_out_only: _Switch = Field(False, description="accept no incoming connections")
    no_port_mapping: _Switch = Field(False, description="do not ask the router to open a port (UPnP, NAT-PMP)")
    max_upload: Annotated[_Rate | None, _Limit] = Field(
        None, description="maximum upload rate, such as 20mbit [default: no limit]"
    )
    max_download: Annotated[_Rate | None, _Limit] = Field(
        None, description="maximum download rate, such as 100mbit [default: no limit]"
    )
    monthly_quota: Annotated[_Amount | None, _Limit] = Field(
        None, description="maximum bytes sent and received in a calendar month, such as 500GB [default: no limit]"
    )
    hours: Annotated[_Hours | None, _Limit] = Field(
        None, description="local time in which to train, such as 22:00-07:00 [default: always]"
    )
    days: Annotated[_Days | None, _Limit] = Field(
        None, description="days on which to train, such as sat,sun or mon-fri [default: all]"
    )
    on_battery: Literal["pause", "run"] = Field("run", description="pause or run while on battery power")
    disk_cap: Annotated[_Amount | None, _Limit] = Field(
        None, description="maximum size of the state directory, such as 20GB [default: no limit]"
    )
    disk_free: Annotated[_Amount | None, _Limit] = Field(
        None, description="space to leave free on the disk of the state directory, such as 10GB [default: none]"
    )
    nice: Annotated[Annotated[int, Field(ge=0, le=19), _Number] | None, _Limit] = Field(
        None, description="lower the priority of this process: 0 to 19, 19 is the lowest [default: unchanged]"
    )
    gpu_duty: Annotated[Annotated[float, Field(ge=0.05, le=1.0), _Number] | None, _Limit] = Field(
        None, description="share of the time in which training may use the device, such as 0.5 [default: all]"
    )
    keep_trace: _Switch = Field(
        False, description="record each step of the exchange, for `python -m research replay` in a checkout"
    )
    tensorboard: Annotated[Path, _Home] | None = Field(
        None, description="folder for TensorBoard: loss, speed, members, traffic; needs the package tensorboard"
    )

    @property
    def identity_file(self) -> Path:
        return self.identity_path or self.state_directory / IDENTITY_FILE

    @property
    def schedule(self) -> tuple[Hours | None, Days | None]:
        """Hours and days in which to train; None: all."""
        return (
            None if self.hours is None else parse_hours(self.hours, "hours"),
            None if self.days is None else parse_days(self.days, "days"),
        )

    def limit_texts(self) -> dict[str, str]:
        """Return the limits in force as texts that the settings accept; without those that do not limit anything."""
        texts = {key: _limit_text(key, getattr(self, key)) for key in LIMITS}
        return {key: text for key, text in texts.items() if text and (key, text) != ("on_battery", "run")}

    def with_limits(self, texts: Mapping[str, str], source: str) -> PeerSettings:
        """Return a copy with changed limits.

        Args:
            texts: values by key, as `limits` takes them; "none" removes a limit.
            source: origin of the texts, for errors.
        Raises:
            ConfigError: a key is not one of `LIMITS`, or a value is invalid.
        """
        for key in texts:
            if key not in LIMITS:
                raise ConfigError(
                    f"{key} in {source} cannot be changed while a peer runs; expected {', '.join(LIMITS)}"
                )
        changed = validated(PeerSettings, texts, source)
        return self.model_copy(update={key: getattr(changed, key) for key in texts})

    def listen_addresses(self, default_port: int) -> tuple[str, ...]:
        """Return the addresses to listen on; empty for a peer that only dials out.

        Args:
            default_port: port if none is set: `BOOTSTRAP_PORT` for a bootstrap peer, 0 (any) for others.
        """
        if self.dial_out_only:
            return ()
        port = default_port if self.port is None else self.port
        return self.host_maddrs or (f"/ip4/0.0.0.0/tcp/{port}",)

    def announced_addresses(self, default_port: int) -> tuple[str, ...]:
        """Return the addresses to announce, without peer id; empty: announce the addresses listened on.

        Args:
            default_port: as for `listen_addresses`.
        Raises:
            ConfigError: there is a public name but no fixed port.
        """
        if self.announce_maddrs or self.public_name is None:
            return self.announce_maddrs
        ports = dict.fromkeys(port_of(address) for address in self.listen_addresses(default_port))
        if 0 in ports:
            raise ConfigError(
                f"public_name {self.public_name} needs a fixed port, but this peer would listen on any free one; set "
                f"one, such as --port {BOOTSTRAP_PORT}"
            )
        kind = f"ip{ipaddress.ip_address(self.public_name).version}" if _is_ip(self.public_name) else "dns4"
        return tuple(f"/{kind}/{self.public_name}/tcp/{port}" for port in ports)


def _limit_text(key: str, value: Any) -> str:
    """Return the value of a limit as text; empty if there is none."""
    if value is None:
        return ""
    if key in _CAPS:
        return f"{value / 1e3:.12g}kbit"
    return f"{value / 1e6:.12g}MB" if key in _AMOUNTS else str(value)


def bytes_per_second(cap: float | None) -> float | None:
    return None if cap is None else cap / 8.0


def load_settings(
    *,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    files: Sequence[Path] = (),
    flags_source: str = "the command line",
) -> PeerSettings:
    """Merge the layers.

    Args:
        flags: values by name, with dashes or underscores; None and empty lists count as not given.
        environment: environment variables; those without our prefix are ignored.
        files: TOML files; later ones override earlier ones.
        flags_source: origin of `flags`, for errors.
    Raises:
        ConfigError: a key is unknown, a value is invalid, or two settings contradict each other.
    """
    merged: Document = {}
    for file in files:
        merged |= _checked({as_key(key): value for key, value in read_toml(file).items()}, str(file))
    merged |= _checked(_environment_layer(environment or {}), "the environment")
    given = {as_key(key): value for key, value in (flags or {}).items() if value is not None and value not in ((), [])}
    merged |= _checked(given, flags_source)
    settings = validated(PeerSettings, merged, "the settings")
    _check_together(settings)
    return settings


def flags_as_keys(text: str) -> str:
    """Reword a sentence for Python users: flags become keys, such as --max-upload to max_upload."""
    return _FLAG.sub(lambda found: key if (key := as_key(found[0])) in PeerSettings.model_fields else found[0], text)


def _checked(layer: Document, source: str) -> Document:
    """Check one layer separately, so that an error can name its source."""
    agreed = {*known_keys(RunManifest), *RunManifest.model_fields} - set(PeerSettings.model_fields)
    for key in given_keys(layer):
        if key not in PeerSettings.model_fields and canonical_key(key, source) in agreed:
            raise ConfigError(
                f"{key} in {source} belongs to the run and is the same for all peers; "
                "only the organiser can change it, in run.toml"
            )
    validated(PeerSettings, layer, source)
    return layer


def _check_together(settings: PeerSettings) -> None:
    if settings.port is not None and settings.host_maddrs:
        raise ConfigError(
            f"port {settings.port} and host_maddrs {settings.host_maddrs[0]} both name a port to listen on; "
            "use only one of them"
        )
    listening = (settings.host_maddrs, settings.announce_maddrs, settings.public_name)
    if settings.dial_out_only and any(listening):
        raise ConfigError(
            "dial_out_only contradicts host_maddrs, announce_maddrs and public_name; use only one of them"
        )


def _environment_layer(environment: Mapping[str, str]) -> Document:
    layer: Document = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key not in PeerSettings.model_fields:
            near = nearest_key(key, PeerSettings.model_fields)
            known = ", ".join(f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in PeerSettings.model_fields)
            hint = f"did you mean {ENVIRONMENT_PREFIX}{near.upper()}?" if near else f"known are: {known}"
            raise ConfigError(f"unknown variable {variable} in the environment; {hint}")
        # Shells and compose files use an empty variable for "not set".
        if text:
            layer[key] = text
    return layer


def as_key(name: str) -> str:
    """Return the key of a setting whose flag is `name`, such as `--max-upload`."""
    return name.removeprefix("--").replace("-", "_")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
