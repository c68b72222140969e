"""Settings: everything that is private to one machine. They are never sent to other peers.

Each key is looked up in four layers, in this order: flag, environment (`P2P_DILOCO_PORT=…`), file (`@peer.toml`),
default. An unknown key in any layer is an error.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from platformdirs import user_data_path
from pydantic import BaseModel, ConfigDict, Field, field_validator

from p2p_diloco.config.address import parse_host_address, parse_peer_address, port_of
from p2p_diloco.config.hours import Days, Hours, parse_days, parse_hours
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

_Value = TypeVar("_Value")

ENVIRONMENT_PREFIX = "P2P_DILOCO_"
BOOTSTRAP_PORT = 31337
IDENTITY_FILE = "identity.key"
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

_LISTS = frozenset({"host_maddrs", "announce_maddrs", "initial_peers"})
_NUMBERS = frozenset({"port", "threads", "keep_checkpoints", "windows_at_once", "ranks", "nice", "gpu_duty"})
_SWITCHES = frozenset({"dial_out_only", "no_port_mapping", "keep_trace"})
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?", re.ASCII)
_FLAG = re.compile(r"(?<![\w-])--[a-z]+(-[a-z]+)*(?!\w|-|\.\w)")
_HOST_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,62})(\.[a-z0-9]([a-z0-9-]{0,62}))*\.?", re.IGNORECASE)


class PeerSettings(BaseModel):
    """The settings of one machine; all have defaults, so that an invite is enough to join."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    device: str = Field("auto", description="device to train on: auto, cpu, cuda, cuda:<number> or mps")
    threads: Annotated[int, Field(ge=1, le=4096)] | None = Field(None, description="CPU threads that training may use")
    data: str | None = Field(None, description="your copy of the training text: a file, a folder or a glob")
    model: str | None = Field(
        None, description="your copy of the base model of LoRA, or the python:module:function that may run here"
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="precision of matrix products: auto (as run and device allow), float32, bfloat16 or float16"
    )
    windows_at_once: Annotated[int, Field(ge=1, le=2**20)] | None = Field(
        None, description="windows of a step that pass through the model at a time [default: as many as fit]"
    )
    recompute: Literal["auto", "always", "never"] = Field(
        "auto", description="recompute activations to save memory: auto (if one window does not fit), always or never"
    )
    ranks: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="processes that `join` starts to train together [default: one for each GPU]"
    )
    shards: Literal["auto", "always", "never"] = Field(
        "auto", description="cut the model among ranks: auto (if a copy does not fit each GPU), always or never"
    )
    state_directory: Path = Field(
        default_factory=lambda: user_data_path("p2p-diloco", appauthor=False),
        strict=False,  # a text will do
        description="folder for identity and checkpoints; each peer on this machine needs its own",
    )
    keep_checkpoints: Annotated[int, Field(ge=1, le=1000)] = Field(3, description="number of checkpoints to keep")
    identity_path: Path | None = Field(
        None, description="key file of this peer [default: identity.key in the state directory]"
    )
    port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="TCP port to listen on [default: a free one, the same at every start]"
    )
    public_name: str | None = Field(None, description="host name or IP address under which others reach this machine")
    host_maddrs: tuple[str, ...] = Field((), description="multiaddrs to listen on [default: all interfaces]")
    announce_maddrs: tuple[str, ...] = Field(
        (), description="multiaddrs to announce [default: those that it listens on]"
    )
    initial_peers: tuple[str, ...] = Field((), description="more peers to contact first, besides those in the invite")
    dial_out_only: bool = Field(False, description="accept no incoming connections")
    no_port_mapping: bool = Field(False, description="do not ask the router to open a port (UPnP, NAT-PMP)")
    max_upload: float | None = Field(None, description="maximum upload rate, such as 20mbit [default: no limit]")
    max_download: float | None = Field(None, description="maximum download rate, such as 100mbit [default: no limit]")
    monthly_quota: float | None = Field(
        None, description="maximum bytes sent and received in a calendar month, such as 500GB [default: no limit]"
    )
    hours: str | None = Field(None, description="local time in which to train, such as 22:00-07:00 [default: always]")
    days: str | None = Field(None, description="days on which to train, such as sat,sun or mon-fri [default: all]")
    on_battery: Literal["pause", "run"] = Field("run", description="pause or run while on battery power")
    disk_cap: float | None = Field(
        None, description="maximum size of the state directory, such as 20GB [default: no limit]"
    )
    disk_free: float | None = Field(
        None, description="space to leave free on the disk of the state directory, such as 10GB [default: none]"
    )
    nice: Annotated[int, Field(ge=0, le=19)] | None = Field(
        None, description="lower the priority of this process: 0 to 19, 19 is the lowest [default: unchanged]"
    )
    gpu_duty: Annotated[float, Field(ge=0.05, le=1.0)] | None = Field(
        None, description="share of the time in which training steps may use the device, such as 0.5 [default: all]"
    )
    keep_trace: bool = Field(
        False, description="record each step of the exchange, for `python -m research replay` in a checkout"
    )
    tensorboard: Path | None = Field(
        None, description="folder for TensorBoard: loss, speed, members, traffic; needs the package tensorboard"
    )

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"unknown device {device!r}; expected auto, cpu, cuda, cuda:<number> or mps")
        return device

    @field_validator(*_AMOUNTS, mode="before")
    @classmethod
    def _amount_is_in_bytes(cls, amount: object) -> object:
        return _as_value_error(lambda text: parse_bytes(text, "it"), amount) if isinstance(amount, str) else amount

    @field_validator(*_AMOUNTS)
    @classmethod
    def _amount_is_not_tiny(cls, amount: float | None) -> float | None:
        if amount is not None and amount < LEAST_AMOUNT:
            raise ValueError(f"{format_bytes(amount)} is too little; expected at least {format_bytes(LEAST_AMOUNT)}")
        return amount

    @field_validator("hours")
    @classmethod
    def _hours_are_hours(cls, hours: str | None) -> str | None:
        return None if hours is None else str(_as_value_error(lambda text: parse_hours(text, "it"), hours))

    @field_validator("days")
    @classmethod
    def _days_are_days(cls, days: str | None) -> str | None:
        return None if days is None else str(_as_value_error(lambda text: parse_days(text, "it"), days))

    @field_validator(*_CAPS, mode="before")
    @classmethod
    def _cap_is_a_rate(cls, cap: object) -> object:
        if cap is None or isinstance(cap, bool):
            return cap
        try:
            bits = float(cap) if isinstance(cap, int | float) else parse_rate(str(cap), "it")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if bits < SLOWEST_CAP:
            raise ValueError(
                f"{format_rate(bits)} is too slow to take part in a run; expected at least {format_rate(SLOWEST_CAP)}"
            )
        return bits

    @field_validator(*(key for key in LIMITS if key != "on_battery"), mode="before")
    @classmethod
    def _no_limit_is_none(cls, value: object) -> object:
        # Validators run from the last one to the first: this one must see the text before the others.
        return None if isinstance(value, str) and value.strip().lower() == NO_LIMIT else value

    @field_validator("host_maddrs", "announce_maddrs")
    @classmethod
    def _hosts_are_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_as_value_error(parse_host_address, address) for address in addresses)

    @field_validator("initial_peers")
    @classmethod
    def _peers_are_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_as_value_error(lambda text: parse_peer_address(text)[0], address) for address in addresses)

    @field_validator("public_name")
    @classmethod
    def _public_name_is_a_name(cls, name: str | None) -> str | None:
        if name is None or _is_ip(name) or _HOST_NAME.fullmatch(name):
            return name
        raise ValueError(f"{name!r} is not a host name or IP address; expected one such as bootstrap.example.org")

    @field_validator("state_directory", "identity_path", "tensorboard")
    @classmethod
    def _home_is_known(cls, path: Path | None) -> Path | None:
        return None if path is None else Path(os.path.expanduser(path))

    @field_validator("data")
    @classmethod
    def _home_of_data_is_known(cls, data: str | None) -> str | None:
        return None if data is None else os.path.expanduser(data)

    @property
    def identity_file(self) -> Path:
        """Path of this peer's key file."""
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
        layer = {key: _from_text(key, text) for key, text in texts.items()}
        changed = validated(PeerSettings, layer, source)
        return self.model_copy(update={key: getattr(changed, key) for key in layer})

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
    """Convert a cap from bits to bytes per second."""
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
        merged |= _checked({_as_key(key): value for key, value in read_toml(file).items()}, str(file))
    merged |= _checked(_environment_layer(environment or {}), "the environment")
    given = {_as_key(key): value for key, value in (flags or {}).items() if value is not None and value not in ((), [])}
    merged |= _checked({key: _from_flag(key, value) for key, value in given.items()}, flags_source)
    settings = validated(PeerSettings, merged, "the settings")
    _check_together(settings)
    return settings


def flags_as_keys(text: str) -> str:
    """Reword a sentence for Python users: flags become keys, such as --max-upload to max_upload."""
    return _FLAG.sub(lambda found: key if (key := _as_key(found[0])) in PeerSettings.model_fields else found[0], text)


def split_arguments(
    arguments: Sequence[str], undotted: Collection[str] = ()
) -> tuple[list[str], tuple[Path, ...], dict[str, Any]]:
    """Split `@file.toml` and dotted overrides (`--outer.momentum 0.7`, `--outer.momentum=0.7`) from a command line.

    Args:
        arguments: the words of the command line.
        undotted: names that are overrides even without a dot, such as `outer_lr`.
    Returns:
        The other arguments, with dashes instead of underscores in flag names; the files; the overrides by dotted key.
    Raises:
        ConfigError: an override without a value.
    """
    rest: list[str] = []
    files: list[Path] = []
    overrides: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--":
            rest += [word, *words]
        elif word.startswith("@") and len(word) > 1:
            files.append(Path(word[1:]))
        elif re.fullmatch(r"--[A-Za-z_-]+(\.[A-Za-z_-]+)+", name) or (
            name.startswith("--") and _as_key(name) in undotted
        ):
            text = value if equals else next(words, None)
            if text is None:
                raise ConfigError(f"{word} needs a value")
            overrides[_as_key(name[2:])] = parse_value(text)
        elif word.startswith("--"):
            rest.append(f"{name.replace('_', '-')}{equals}{value}")
        else:
            rest.append(word)
    return rest, tuple(files), overrides


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
            layer[key] = _from_text(key, text)
    return layer


def _from_text(key: str, text: str) -> Any:
    if key in _LISTS:
        return _split_list(text)
    if key in _SWITCHES:
        return {"1": True, "yes": True, "true": True, "0": False, "no": False, "false": False}.get(text.lower(), text)
    return parse_value(text) if key in _NUMBERS else text


def _from_flag(key: str, value: Any) -> Any:
    if key in _LISTS and not isinstance(value, str) and isinstance(value, Iterable):
        return [part for text in value for part in _split_list(str(text))]
    return _from_text(key, value) if isinstance(value, str) else value


def _split_list(text: str) -> list[str]:
    return [part for part in re.split(r"[\s,]+", text) if part]


def _as_key(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _as_value_error(parse: Callable[[str], _Value], text: str) -> _Value:
    try:
        return parse(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
