"""The manifest: everything that the peers of a run must agree on, signed by its organiser.

Its SHA-256 is the run id, so a one-line invite fixes model, data, optimisers, codec, clock and trust. Settings that are
private to one machine are in `settings.py` and are never sent. `p2p-diloco new` writes the descriptions of the fields
below into `run.toml` as comments.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from p2p_diloco.config.decoder import MODEL_SIZES, MOST_PARAMETERS, ModelShape, count_parameters
from p2p_diloco.errors import ConfigError, FrameError, StateError, clean_text, has_unseen
from p2p_diloco.ids import DIGEST_BYTES, Digest, format_peer_id, parse_peer_id, sha256
from p2p_diloco.outer.fragments import MOST_SPANS
from p2p_diloco.signing import SIGNATURE_BYTES, SigningKey, is_signed_by

MANIFEST_FORMAT: Literal[5] = 5
MAX_MANIFEST_BYTES, MAX_CONFIG_BYTES = 64 * 1024, 16 * 1024
LATEST_CLOCK_START = 1e11
"""Thousands of years from now. A value in milliseconds is above this limit; with it, round 0 would never begin."""
SHORTEST_ROUND, LONGEST_ROUND = 0.05, 7 * 86400.0
"""Seconds."""
STANDARD_LIBRARY = "stdlib"
"""Names the text that every machine has: the source of Python's standard library."""
BUILT_IN = "built-in"
SAFETENSORS_METADATA = "__metadata__"
HUGGING_FACE, PYTHON = "hf:", "python:"
"""Prefixes of `model.source`: a model of transformers, and a function that returns a model."""

# The signed statement begins with this, so that the signature is not valid for any other kind of statement.
_STATEMENT_PREFIX = b"p2p-diloco manifest 4\n"

_DIGEST_DIGITS = 2 * DIGEST_BYTES


def _printable(text: str) -> str:
    """Refuse control characters, which could manipulate the terminal that shows this text."""
    if not text or has_unseen(text):
        raise ValueError("expected text of at least one character, without control characters")
    return text


def _digest_text(text: str) -> str:
    if len(text) != _DIGEST_DIGITS or set(text) - set("0123456789abcdef"):
        raise ValueError(f"expected {_DIGEST_DIGITS} hexadecimal digits in lower case")
    return text


def _peer_text(text: str) -> str:
    try:
        parse_peer_id(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return text


def _text_path(path: str) -> str:
    if not path:
        raise ValueError('expected "stdlib" or the path of a text: a file, a folder or a glob')
    return _printable(path)


def _split_list(value: object) -> object:
    """Accept a comma-separated string too, which is how lists are written on a command line."""
    parts = value.replace(",", " ").split() if isinstance(value, str) else value
    return tuple(parts) if isinstance(parts, list) else parts


DigestText = Annotated[str, AfterValidator(_digest_text)]
PeerText = Annotated[str, AfterValidator(_peer_text)]
CodecName = Literal["float32", "bfloat16", "int8", "int4"]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=2**20)]


class Section(BaseModel):
    """A frozen part of a manifest; keys and types are exact, numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


TensorRow = tuple[
    Annotated[str, Field(max_length=256), AfterValidator(_printable)],
    Annotated[tuple[Annotated[int, Field(ge=1, le=2**40)], ...], Field(max_length=8)],
    Literal["radial", "plain"],
]
"""A trained tensor of a user's own model: its name, its shape, and how it is averaged."""


ModelKind = Literal["built-in", "own", "hf", "python"]
_ONLY_FOR: dict[tuple[ModelKind, ...], tuple[str, ...]] = {
    ("built-in", "own"): ("layers", "width", "heads", "feed_forward"),
    ("hf",): ("config", "lora_targets"),
    ("python",): ("code",),
}


def _source(source: str) -> str:
    if source == BUILT_IN:
        return source
    if source.startswith(HUGGING_FACE) and len(source) > len(HUGGING_FACE):
        return _printable(source)
    if re.fullmatch(r"python:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", source, re.ASCII):
        return source
    raise ValueError(
        f'expected "{BUILT_IN}", "hf:" and a folder or id of a Hugging Face model, or "python:module:function"'
    )


def _one_object(text: str) -> str:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ValueError("expected a JSON object, like config.json of the model")
    return text


class ModelSection(Section):
    """The model: the built-in decoder, a Hugging Face model, a function of your own, or your own training loop.

    All but the first list their tensors. `p2p-diloco new` and `p2p_diloco.new_run` write them.
    """

    source: Annotated[str, Field(max_length=1024), AfterValidator(_source)] = Field(
        BUILT_IN, description='"built-in", "hf:<folder or id>" or "python:<module>:<function>"'
    )
    size: Literal["tiny", "small", "base"] = Field("tiny", description="tiny = 1M, small = 10M, base = 125M parameters")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="seed of the initial parameters")
    layers: Annotated[int, Field(ge=1, le=4096)] | None = Field(None, description="number of transformer blocks")
    width: Count | None = Field(None, description="width of the residual stream")
    heads: Count | None = Field(None, description="attention heads per block")
    feed_forward: Count | None = Field(None, description="width of the SwiGLU layer")
    context: Count | None = Field(None, description="context length in tokens")
    vocabulary: Count | None = Field(None, description="number of tokens; by default 256, one for each byte")
    config: Annotated[str, Field(max_length=MAX_CONFIG_BYTES), AfterValidator(_one_object)] | None = Field(
        None, description="config.json of a Hugging Face model; peers build the model from it"
    )
    weights: Literal["new", "loaded"] = Field(
        "new", description="new | loaded: start a Hugging Face model with random weights, or with those of its source"
    )
    lora_rank: Annotated[int, Field(ge=0, le=4096)] = Field(
        0, description="rank of the LoRA adapters; 0: train all weights"
    )
    lora_alpha: Positive = Field(16.0, description="scale of the LoRA adapters: lora_alpha / lora_rank")
    lora_targets: Annotated[
        tuple[Annotated[str, Field(max_length=256), AfterValidator(_printable)], ...],
        Field(max_length=64),
        BeforeValidator(_split_list),
    ] = Field((), description="modules with an adapter, such as q_proj; by default those that peft chooses")
    code: DigestText | None = Field(None, description="SHA-256 of the file of a Python module")
    tensors: Annotated[tuple[TensorRow, ...], Field(max_length=4096)] = Field(
        (), description="trained tensors: name, shape, radial | plain"
    )
    rest: DigestText | None = Field(
        None,
        description="SHA-256 over frozen weights and buffers, such as the base model of LoRA",
    )
    ignored: tuple[Annotated[str, Field(max_length=256), AfterValidator(_printable)], ...] = Field(
        (), description="frozen tensors that may differ between peers"
    )
    start: DigestText | None = Field(
        None,
        description="SHA-256 of *.start.safetensors, with the initial values",
    )

    @property
    def kind(self) -> ModelKind:
        """Kind of the source: which code builds the model."""
        if self.source.startswith(HUGGING_FACE):
            return "hf"
        if self.source.startswith(PYTHON):
            return "python"
        return "own" if self.tensors else "built-in"

    @property
    def is_own_loop(self) -> bool:
        """Whether peers join from a training loop of their own, because no command can build the model."""
        return self.kind == "own"

    @property
    def window_tokens(self) -> int | None:
        """Number of tokens that a training window predicts; None if only the program or source of the model has it."""
        return self.context or (MODEL_SIZES[self.size].context if self.kind == "built-in" else None)

    @model_validator(mode="after")
    def _fits_into_a_machine(self) -> Self:
        sizes = dataclasses.asdict(MODEL_SIZES[self.size]) | self.changes()
        if self.tensors:
            counted = sum(math.prod(shape) for _, shape, _ in self.tensors)
        else:
            counted = count_parameters(*(sizes[name] for name in ("layers", "width", "feed_forward", "vocabulary")))
        if counted > MOST_PARAMETERS:
            raise ValueError(f"the model has {counted:,} parameters; expected at most {MOST_PARAMETERS:,}")
        if self.kind in ("built-in", "own"):
            try:
                ModelShape(**sizes)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _tensors_have_names_of_their_own(self) -> Self:
        names = [name for name, _, _ in self.tensors]
        twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        if twice is not None:
            raise ValueError(f"tensor {twice!r} is listed twice; list a tied tensor once")
        if SAFETENSORS_METADATA in names:
            raise ValueError(f"a tensor cannot be called {SAFETENSORS_METADATA}, because files could not hold it")
        if not self.tensors and (self.rest is not None or self.ignored):
            raise ValueError("rest and ignored only apply to your own model; list its tensors, or leave them out")
        return self

    @model_validator(mode="after")
    def _values_belong_to_the_source(self) -> Self:
        kind = self.kind
        for kinds, names in _ONLY_FOR.items():
            for name in names if kind not in kinds else ():
                if getattr(self, name):
                    raise ValueError(f'{name} has no effect with source = "{self.source}"; leave it out')
        if kind != "hf" and (self.lora_rank or self.weights == "loaded"):
            raise ValueError(f'lora_rank and weights have no effect with source = "{self.source}"; leave them out')
        if self.lora_rank and self.weights == "new":
            raise ValueError('LoRA adapts trained weights; set weights = "loaded", or leave lora_rank out')
        return self

    def changes(self) -> dict[str, int]:
        """Return what differs from the named size, by name."""
        names = ("layers", "width", "heads", "feed_forward", "context", "vocabulary")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class DataSection(Section):
    """The training text. Each peer draws its own share of it.

    The path is the organiser's. A joining peer never opens it, because it could name private files. It gives the path
    of its own copy with `--data`, or fetches the text from other peers if the run shares it. "stdlib" needs neither.
    """

    path: Annotated[str, Field(max_length=1024), AfterValidator(_text_path)] = Field(
        STANDARD_LIBRARY,
        description='"stdlib" = source of Python\'s standard library; else --data names each copy, or share = true',
    )
    fingerprint: DigestText | None = Field(None, description="SHA-256 of the text; a peer with another text is refused")
    share: bool = Field(False, description="peers send the text to those without a copy; needs files")
    files: DigestText | None = Field(
        None, description="SHA-256 of the list of files, which `p2p-diloco fingerprint` prints; for share = true"
    )
    tokenizer: DigestText | None = Field(
        None,
        description="SHA-256 of tokenizer-files.json of `p2p-diloco tokenize`; not set: tokens are bytes",
    )
    held_out: Annotated[float, Field(ge=0.001, le=0.5)] = Field(
        0.05, description="share of a text of bytes that is kept for evaluation"
    )

    @model_validator(mode="after")
    def _tokens_are_of_one_text(self) -> Self:
        if self.tokenizer is not None and (self.fingerprint is None or self.path == STANDARD_LIBRARY):
            raise ValueError(
                "tokenizer needs the path of a folder of tokens and its fingerprint; see p2p-diloco tokenize"
            )
        return self

    @model_validator(mode="after")
    def _a_shared_text_has_a_list(self) -> Self:
        if self.share and self.path == STANDARD_LIBRARY:
            raise ValueError('share = true has no meaning with path = "stdlib", which every machine has; leave it out')
        if self.share != (self.files is not None):
            raise ValueError(
                "share = true and files belong together; set both or none (`p2p-diloco fingerprint PATH` prints files)"
            )
        return self


class InnerSection(Section):
    """Inner steps: how each island trains between exchanges."""

    optimizer: Literal["adamw", "muon"] = Field(
        "muon", description="muon (matrices of the blocks; adamw for the rest) | adamw"
    )
    learning_rate: Positive = Field(1e-3, description="learning rate after warm-up")
    embedding_rate: Positive = Field(8.0, description="multiple of the learning rate for the input embedding")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="weight decay of matrices")
    beta1: Decay = Field(0.9, description="decay of the first moment")
    beta2: Decay = Field(0.98, description="decay of the second moment")
    step_tokens: Annotated[int, Field(ge=1, le=2**30)] = Field(
        256, description="predicted tokens of an inner step: a multiple of the context"
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(40, description="steps of linear warm-up")
    schedule: Literal["constant", "cosine"] = Field(
        "constant", description="constant | cosine over rounds.planned_cycles, down to a tenth of the rate"
    )
    gradient_clip: Positive = Field(1.0, description="maximum norm of the gradient")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="precision of matrix products")


SUITED_RATES = {
    "muon": {"tiny": 4e-3, "small": 4e-3, "base": 2e-3},
    "adamw": {"tiny": 2e-3, "small": 1e-3, "base": 4e-4},
}
"""Inner learning rates for each built-in size: half of the best rate in short trials with a cosine schedule; for small
with Muon the full rate, since means are radial. Base, and small with AdamW, are not tuned
(docs/decisions/inner-steps.md)."""


class OuterSection(Section):
    """Outer step: how the anchor moves along an agreed update, and how local parameters follow."""

    learning_rate: Positive = Field(0.7, description="outer learning rate")
    momentum: Decay = Field(0.3, description="Nesterov momentum; keep it low, because updates arrive a round late")
    final_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the rate left after rounds.planned_cycles; it falls over their last quarter"
    )
    mean: Literal["radial", "plain"] = Field(
        "radial", description="radial (average lengths and directions apart, except in embedding and head) | plain"
    )
    merge: Literal["keep", "blend"] = Field(
        "keep", description="keep | blend: local parameters move with the anchor, or mix with it"
    )
    fragment_update_alpha: Share = Field(0.0, description="share of the local parameters when merge is blend")

    @model_validator(mode="after")
    def _alpha_belongs_to_blend(self) -> Self:
        if self.merge != "blend" and self.fragment_update_alpha != 0.0:
            raise ValueError(
                f'fragment_update_alpha = {self.fragment_update_alpha} has no meaning with merge = "{self.merge}"; '
                'set merge = "blend" or leave it out'
            )
        return self


class CodecSection(Section):
    """Format on the wire: float32, bfloat16, int8 or int4."""

    contribution: CodecName = Field("int4", description="from a peer to a reducer")
    entry: CodecName = Field("int4", description="from the owner of a span to all peers")


class RoundsSection(Section):
    """Timing. Each round exchanges one fragment; `fragments` rounds are a cycle."""

    clock_start: Annotated[float, Field(ge=0, le=LATEST_CLOCK_START)] = Field(
        description="start of round 0, in Unix seconds"
    )
    round_seconds: Annotated[float, Field(ge=SHORTEST_ROUND, le=LONGEST_ROUND)] = Field(
        5.0, description="length of a round; slow links need longer ones"
    )
    fragments: Annotated[int, Field(ge=1, le=1024)] = Field(
        4, description="parts of the model that are exchanged in turn"
    )
    spans_per_fragment: Annotated[int, Field(ge=1, le=MOST_SPANS)] = Field(
        16, description="slices of a fragment; best one for each peer of a group"
    )
    planned_cycles: Count = Field(
        1000, description="planned length of the run; schedules follow it, but the run does not stop there"
    )
    planned_steps: Annotated[int, Field(ge=1, le=2**31)] | None = Field(
        None, description="planned inner steps per cycle; `status` warns when a machine is far off"
    )
    retained_cycles: Count = Field(16, description="cycles of entries that peers keep for others to catch up with")


class MembershipSection(Section):
    """Groups of peers."""

    group_size: Annotated[int, Field(ge=1, le=1024)] = Field(
        16, description="peers that average with each other in one row"
    )


class TrustSection(Section):
    """Access to the run, and what counts of what its members report."""

    mode: Literal["open", "listed"] = Field(
        "open", description="open = anyone with the invite; listed = only the peers listed here"
    )
    peers: Annotated[tuple[PeerText, ...], Field(max_length=256), BeforeValidator(_split_list)] = Field(
        (), description="peer ids that may join when mode is listed"
    )
    weights: Literal["equal", "tokens"] = Field(
        "equal",
        description="equal = none counts for more than most (strangers) | tokens = by tokens reported (friends)",
    )

    @model_validator(mode="after")
    def _listed_names_somebody(self) -> Self:
        if (self.mode == "listed") != bool(self.peers):
            raise ValueError('mode = "listed" and peers belong together; set both or none')
        return self


class RunManifest(Section):
    """One run. Frozen; equal manifests have equal digests on every machine."""

    format: Literal[5] = Field(MANIFEST_FORMAT, description="version of this format")
    name: Annotated[str, Field(max_length=64), AfterValidator(_printable)] = Field(description="name of the run")
    organiser: PeerText = Field(description="peer id of the key that signs this run")
    founder: PeerText | None = Field(
        None, description="peer id of the only peer that may found the run; if not set, the peer that founds it"
    )
    created: Annotated[int, Field(ge=0)] = Field(
        description="time of writing in Unix seconds; otherwise equal runs differ in it"
    )
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    inner: InnerSection = InnerSection()
    outer: OuterSection = OuterSection()
    codec: CodecSection = CodecSection()
    rounds: RoundsSection
    membership: MembershipSection = MembershipSection()
    trust: TrustSection = TrustSection()

    @model_validator(mode="after")
    def _model_has_the_tokens_of_the_text(self) -> Self:
        if self.data.tokenizer is None and self.model.vocabulary not in (None, 256) and self.model.kind == "built-in":
            raise ValueError(
                f"model.vocabulary is {self.model.vocabulary}, but the tokens of this text are its 256 bytes; leave it "
                "out, or make a folder of other tokens with p2p-diloco tokenize and name it as data.path"
            )
        return self

    @model_validator(mode="after")
    def _own_loops_read_their_own_text(self) -> Self:
        if self.data.share and self.model.is_own_loop:
            raise ValueError(
                "data.share = true only applies to models that `join` trains; your own training loop reads its own "
                "text, so leave it out"
            )
        return self

    @property
    def plans_an_end(self) -> bool:
        """Whether `rounds.planned_cycles` was chosen or a rate falls towards it; its default alone plans nothing."""
        falls = self.inner.schedule == "cosine" or self.outer.final_share < 1.0
        return falls or self.rounds.planned_cycles != RoundsSection.model_fields["planned_cycles"].default

    def canonical_bytes(self) -> bytes:
        """Return the canonical JSON: sorted keys, no spaces, shortest floats, ASCII."""
        document = self.model_dump(mode="json")
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")

    def digest(self) -> Digest:
        """Return the run id."""
        return sha256(self.canonical_bytes())

    def sign(self, key: SigningKey) -> SignedManifest:
        """Sign as the organiser.

        Raises:
            ConfigError: `key` is not the organiser's, or the manifest is too long to send.
        """
        statement = self.canonical_bytes()
        if format_peer_id(key.peer) != self.organiser:
            raise ConfigError(
                f"the key belongs to {format_peer_id(key.peer)}, but the run names {self.organiser} as its organiser; "
                "use the key that `p2p-diloco new` made with this run, or make a new run"
            )
        if len(statement) + SIGNATURE_BYTES > MAX_MANIFEST_BYTES:
            raise ConfigError(f"the manifest has {len(statement)} bytes; expected at most {MAX_MANIFEST_BYTES}")
        return SignedManifest(manifest=self, signature=key.sign(_STATEMENT_PREFIX + statement))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedManifest:
    """The manifest of a run, verified against the run id and its organiser's key. Created by `SignedManifest.verify`.

    Attributes:
        run: the id of the run.
        encoded: the manifest and its signature, to send to other peers.
    """

    manifest: RunManifest
    run: Digest
    encoded: bytes


class SignedManifest(BaseModel):
    """A manifest with its organiser's signature, as sent and stored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    manifest: RunManifest
    signature: bytes

    def encode(self) -> bytes:
        """Return the signature followed by the manifest's canonical bytes."""
        return self.signature + self.manifest.canonical_bytes()

    def verify(self, run: Digest) -> VerifiedManifest:
        """Check that the manifest belongs to `run` and is signed by its organiser.

        Raises:
            ConfigError: it belongs to another run, or the signature is not the organiser's.
        """
        digest = self.manifest.digest()
        if digest != run:
            raise ConfigError(
                f"the manifest has the digest {digest.hex()}, but the invite names run {run.hex()}; "
                "ask for a new invite"
            )
        organiser = parse_peer_id(self.manifest.organiser)
        if not is_signed_by(organiser, _STATEMENT_PREFIX + self.manifest.canonical_bytes(), self.signature):
            raise ConfigError(
                f"the manifest of run {run.hex()} is not signed by its organiser {self.manifest.organiser}; "
                "do not join it"
            )
        return VerifiedManifest(manifest=self.manifest, run=run, encoded=self.encode())


def decode_signed_manifest(encoded: bytes) -> SignedManifest:
    """Parse the output of `SignedManifest.encode`; the signature is not checked here, see `verify`.

    Raises:
        FrameError: it is too long, too short, of an unknown format, or not in canonical form.
    """
    if not SIGNATURE_BYTES < len(encoded) <= MAX_MANIFEST_BYTES:
        raise FrameError(f"a manifest of {len(encoded)} bytes; expected {SIGNATURE_BYTES + 1} to {MAX_MANIFEST_BYTES}")
    statement = bytes(encoded[SIGNATURE_BYTES:])
    other = _other_format(statement)
    if other is not None:
        raise FrameError(f"a manifest of {format_sentence(other)}")
    try:
        manifest = RunManifest.model_validate_json(statement)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = clean_text(".".join(map(str, first["loc"])) or "its text", 100)
        raise FrameError(
            f"a manifest that this version cannot read ({where}: {first['msg']}); was it made by another version?"
        ) from None
    if manifest.canonical_bytes() != statement:
        raise FrameError("a manifest that is not in canonical form; was it made by another version?")
    return SignedManifest(manifest=manifest, signature=bytes(encoded[:SIGNATURE_BYTES]))


def decode_kept_manifest(encoded: bytes, path: Path, remedy: str) -> SignedManifest:
    """Parse a manifest in a state directory. One of another format is not broken: its run needs another version.

    Args:
        path: its place, for errors.
        remedy: what to do if it is broken.
    Raises:
        StateError: it is of another format, or broken.
    """
    other = _other_format(encoded[SIGNATURE_BYTES:])
    if other is not None:
        raise StateError(f"{path} is of {format_sentence(other)}")
    try:
        return decode_signed_manifest(encoded)
    except FrameError as error:
        raise StateError(f"{path} is broken ({error}); {remedy}") from None


def format_sentence(found: int) -> str:
    """Return an error text for a manifest of format `found`, with what to do."""
    return (
        f"format {found}, and this version of p2p-diloco reads format {MANIFEST_FORMAT}; use the version that made the "
        "run, or make a new run with `p2p-diloco new`"
    )


def _other_format(statement: bytes) -> int | None:
    try:
        document = json.loads(statement)
    except (ValueError, RecursionError):
        return None
    found = document.get("format") if isinstance(document, dict) else None
    return found if type(found) is int and found != MANIFEST_FORMAT else None
