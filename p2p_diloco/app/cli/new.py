"""`p2p-diloco new`: write `run.toml` and make the key that signs it."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from p2p_diloco.app.cli.options import CommandContext, NewRunOptions
from p2p_diloco.app.cli.output import print_to_stderr
from p2p_diloco.config.manifest import STANDARD_LIBRARY, DataSection, RunManifest
from p2p_diloco.config.run_file import (
    CHOSEN_END,
    CHOSEN_ROUNDS,
    KEY_FILE,
    check_new_run,
    continued_values,
    draft_manifest,
    start_file,
    values_by_key,
    write_new_run,
)
from p2p_diloco.config.settings import PeerSettings, load_settings
from p2p_diloco.config.toml_document import Document, read_toml
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.fragments import suited_spans
from p2p_diloco.rate import counted, format_rate, parse_rate
from p2p_diloco.wording import own_command

if TYPE_CHECKING:  # they import NumPy
    from p2p_diloco.app.text.data import Text
    from p2p_diloco.app.text.tokenizer_files import TokenizerFiles

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w-]*")
"""Matches the id of a dataset on a model hub, such as `owner/name` or `wikitext`."""
_OF_ONE_RUN = frozenset({"organiser", "created"})
_CLOCK_START = "rounds.clock_start"
_PLANNED_CYCLES = "rounds.planned_cycles"
_NOT_CHOSEN = frozenset({"format", "name", "organiser", "created"})


def make_run(path: Path, options: NewRunOptions, around: CommandContext) -> int:
    """Write a new run to `path`; an existing organiser's key is used for this run too.

    Raises:
        ConfigError: `path` exists or its folder does not, or a key or a value is invalid.
        StateError: the folder cannot be written.
    """
    key_path = options.key_path or path.with_name(KEY_FILE)
    check_new_run(path, key_path)
    given = _values_of(around) | ({} if options.name is None else {"name": options.name})
    if options.hours is not None and _PLANNED_CYCLES in given:
        raise ConfigError(f"--hours and {_PLANNED_CYCLES} both set the length of the run; use only one of them")
    start = None
    if options.source is not None:
        given, start = _continued(options, options.source, given)
    elif options.run is not None:
        raise ConfigError("--run chooses the run to continue, but there is no --continue; leave it out")
    given = _with_files(given)
    is_new_key = not key_path.exists()
    # Check the values before making a key, so that a typo leaves no files.
    draft = draft_manifest(now_seconds=time.time(), name=path.stem, values=given)
    text = None
    if not draft.model.is_own_loop:
        _check_text(draft.data.path)
        text = _open_text(draft.data.path, draft.data.held_out)
    described = (_describe_text(text) if start is None else {}) | given
    draft = draft_manifest(now_seconds=time.time(), name=path.stem, values=described)
    notes: tuple[str, ...] = ()
    if draft.model.kind in ("hf", "python") and start is None:
        from p2p_diloco.app.models.run_model import describe_source  # imported late: it imports PyTorch

        found, notes = describe_source(draft.model, _tokenizer_of(text))
        described |= {f"model.{key}": value for key, value in found.items() if value is not None}
        if len(found["tensors"]) < draft.rounds.fragments:  # a fragment consists of whole tensors
            described.setdefault("rounds.fragments", len(found["tensors"]))
        draft = draft_manifest(now_seconds=time.time(), name=path.stem, values=described)
    notes = (*notes, *_check_amount(draft, text))
    flags = {"device": options.device, "threads": options.threads}
    settings = load_settings(flags=flags, environment=around.environment)
    if sys.stdin.isatty() and sys.stdout.isatty() and start is None:
        options = _ask_for_more(options, given)
        described |= _ask_about_trust(described)
    values, of_rounds = _with_rounds(draft, described, options, settings)
    notes = (*notes, *of_rounds, _traffic_of(values))
    write_new_run(path, key_path, now_seconds=time.time(), values=values, start=start)
    print(f"wrote {path}; edit it before the first peer joins")
    if start is not None:
        print(f"wrote {start_file(path)}: what {options.source} has learnt; only the founder needs it")
    for note in notes:
        print(note)
    print(f"{'wrote' if is_new_key else 'using'} {key_path}; it signs the run, so keep it secret and keep a copy")
    print(f"next: {_next_command(path, key_path, draft.data)}")
    return 0


def _continued(options: NewRunOptions, source: Path, given: Document) -> tuple[Document, bytes]:
    """Return the values of a run that continues `source`, and the content of its file of initial values."""
    from p2p_diloco.session.learnt_model import load_source, start_of  # imported late: it imports PyTorch

    learnt = load_source(source, options.run, "--continue")
    for sentence in learnt.refused:
        print_to_stderr(f"p2p-diloco: {sentence}; using an older one")
    chosen = {*(CHOSEN_ROUNDS if options.chooses_rounds else ()), *(CHOSEN_END if options.hours is not None else ())}
    old = learnt.manifest
    values = continued_values(old, given, chosen)
    if "data.path" not in given and not old.model.is_own_loop:
        try:
            _check_text(old.data.path)
        except ConfigError:
            raise ConfigError(f"the run's text is not at {old.data.path}; name your copy with --data.path") from None
    elif not old.model.is_own_loop:
        _check_text(values["data.path"])
        text = _describe_text(_open_text(values["data.path"], old.data.held_out))
        if text.get("data.tokenizer") != old.data.tokenizer:
            raise ConfigError(
                f"the tokens of {values['data.path']} are not those of the run; a run that continues another keeps its "
                "tokenizer, so make the text with that one (p2p-diloco tokenize)"
            )
        values = text | values
    if old.model.kind == "python":
        from p2p_diloco.app.models.python_model import code_digest
        from p2p_diloco.app.models.run_model import build_run_model
        from p2p_diloco.config.run_plan import plan_run

        values["model.code"] = code_digest(old.model.source)
        build_run_model(plan_run(_draft(values)), None, founds=True)  # refuses a module that now builds another model
    start, digest = start_of(learnt)
    return values | {"model.start": digest}, start


def _ask_for_more(options: NewRunOptions, given: Document) -> NewRunOptions:
    """Ask at the terminal for the options that were not given."""
    from p2p_diloco.config.rounds import ASSUMED_UPLINK  # imported late: it imports NumPy

    answers: dict[str, Any] = {}
    if options.islands is None:
        answers["islands"] = _ask("how many islands will train at a time?", "a group of 16", _read_islands)
    if options.uplink is None and not options.lan:
        answers["uplink"] = _ask("upload rate of the slowest island?", ASSUMED_UPLINK, _read_uplink)
    if options.hours is None and _PLANNED_CYCLES not in given:
        answers["hours"] = _ask("planned length of the run in hours?", "no planned end", _read_hours)
    return replace(options, **answers)


def _ask_about_trust(given: Document) -> Document:
    """Ask whether what members report about themselves may count; return the values that follow."""
    if "trust.weights" in given or "trust.peers" in given:
        return {}
    knows = _ask("do you know everybody who will join? then machines count by the tokens they report", "no", _read_yes)
    return {"trust.weights": "tokens"} if knows else {}


def _ask(question: str, otherwise: str, read: Callable[[str], Any]) -> Any:
    """Ask until the answer is valid; return None for an empty answer."""
    while True:
        try:
            text = input(f"{question} [{otherwise}] ").strip()
        except EOFError:
            text = ""
            print()
        try:
            return read(text) if text else None
        except ConfigError as error:
            print(error)


def _read_islands(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{text!r} is not a number of islands; expected 1 or more")
    return int(text)


def _read_uplink(text: str) -> str:
    parse_rate(text, "it")
    return text


def _read_yes(text: str) -> bool:
    if text.lower() not in ("y", "yes", "n", "no"):
        raise ConfigError(f"{text!r} is not an answer; expected yes or no")
    return text.lower().startswith("y")


def _read_hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not (math.isfinite(hours) and hours > 0.0):
        raise ConfigError(f"{text!r} is not a number of hours; expected more than 0, such as 12")
    return hours


def _with_rounds(
    draft: RunManifest, given: Document, options: NewRunOptions, settings: PeerSettings
) -> tuple[Document, tuple[str, ...]]:
    """Return the values of the run, with suitable rounds where none were given, and notes about them."""
    from p2p_diloco.config.rounds import choose_rounds, plan_end, read_conditions  # imported late: it imports NumPy

    values, notes = dict(given), []
    step_seconds = options.step_seconds
    if step_seconds is None and options.chooses_rounds:
        step_seconds, note = _measure(draft, settings)
        notes += note
    if step_seconds is not None:
        conditions = read_conditions(
            islands=options.islands, uplink=options.uplink, step_seconds=step_seconds, lan=options.lan,
            traffic=options.traffic, flag="--",
        )  # fmt: skip
        chosen = choose_rounds(draft, given.keys(), conditions)
        values, notes = chosen.values | values, [*chosen.notes, *notes]
        if options.uplink is None:
            notes.append(f"assuming an uplink of {format_rate(conditions.uplink_bits)}; set it with --uplink")
    elif options.traffic is not None:
        raise ConfigError(f"--traffic needs the duration of a step: {notes[0]}")
    if options.hours is not None:
        end = plan_end(_draft(values), given, options.hours)
        values, notes = end.values | values, [*notes, *end.notes]
    if options.islands is not None:
        values = {"rounds.spans_per_fragment": _spans_for(_draft(values), options.islands)} | values
    return values, tuple(notes)


def _measure(draft: RunManifest, settings: PeerSettings) -> tuple[float | None, list[str]]:
    """Return how long an inner step takes here, and notes about the measurement."""
    from p2p_diloco.app.training import step_benchmark  # imported late: it imports PyTorch

    model = None
    if draft.model.kind in ("hf", "python"):
        from p2p_diloco.app.models.run_model import build_run_model
        from p2p_diloco.config.run_plan import plan_run

        model = build_run_model(plan_run(draft), None, founds=True)
    try:
        step = step_benchmark.measure_inner_step(draft, model=model, device=settings.device, threads=settings.threads)
    except step_benchmark.Unmeasured as error:
        rounds = f"{counted(draft.rounds.fragments, 'round')} of {draft.rounds.round_seconds:g} s"
        return None, [f"the inner step was not measured ({error}), so a cycle is {rounds}; set it with --step-seconds"]
    notes = []
    if step.is_estimated:
        notes.append("a step takes so long that only part of one was measured; set it with --step-seconds if known")
    if step.is_disturbed:
        notes.append("other programs are using this machine's processor; the step time may be off")
    return step.seconds, notes


def _draft(values: Document) -> RunManifest:
    return draft_manifest(now_seconds=time.time(), values=values)


def print_keys() -> None:
    """Print every manifest key that `new` can change, with its default and meaning, by section."""
    draft = draft_manifest(now_seconds=time.time())
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(
        f"\nKeys of {draft.name}.toml. Set any of them here, such as --rounds.round_seconds 10, or in the file before "
        "the first peer joins:"
    )
    for title, prefix, section in (("", "", draft), *_sections(draft)):
        table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False, title_justify="left", title_style="")
        table.title = f"\n{title}" if title else None
        table.add_column(no_wrap=True, min_width=31)
        table.add_column()
        for key, field in type(section).model_fields.items():
            value = getattr(section, key)
            if isinstance(value, BaseModel) or (section is draft and key in _NOT_CHOSEN):
                continue
            setting = "" if value in (None, ()) else "time of writing" if key == "clock_start" else str(value)
            default = f" [default: {setting}]" if setting else ""
            table.add_row(f"--{prefix}{key}", f"{field.description}{default}")
        console.print(table)


def _sections(manifest: RunManifest) -> list[tuple[str, str, BaseModel]]:
    sections = [(name, getattr(manifest, name)) for name in type(manifest).model_fields]
    return [
        (f"{name}: {(type(section).__doc__ or '').partition(chr(10))[0]}", f"{name}.", section)
        for name, section in sections
        if isinstance(section, BaseModel)
    ]


def _next_command(path: Path, key_path: Path, data: DataSection) -> str:
    words = ["bootstrap", str(path), *(["--data", data.path] if data.share else [])]
    if key_path != path.with_name(KEY_FILE):
        words += ["--organiser-key", str(key_path)]
    return own_command(*words)


def _values_of(around: CommandContext) -> Document:
    """Return the values that differ from the defaults, by dotted key; later files override earlier, flags override all.

    A file may be from another run: its organiser, founder and start time are not copied.
    """
    values: Document = {}
    for file in around.files:
        layer = values_by_key(read_toml(file), str(file))
        if _OF_ONE_RUN & layer.keys():
            layer = {key: value for key, value in layer.items() if key not in {*_OF_ONE_RUN, _CLOCK_START, "founder"}}
        values |= layer
    return values | values_by_key(around.overrides, "the command line")


def _check_text(path: str) -> None:
    """Refuse a missing text. To make a run on a machine without the text, write its path into the file afterwards."""
    if path == STANDARD_LIBRARY:
        return
    from p2p_diloco.app.text.mapped_files import list_byte_files

    try:
        list_byte_files(path)
    except ConfigError as error:
        if not _HUB_NAME.fullmatch(path):
            raise ConfigError(f"data.path: {error}") from None
        raise ConfigError(
            f"data.path: there is no file or folder {path} here, and a run reads no dataset itself; make a folder of "
            f"its tokens with p2p-diloco tokenize FOLDER hf:{path}"
        ) from None


def _open_text(path: str, held_out: float) -> Text:
    from p2p_diloco.app.text.data import open_corpus  # imported late: it imports NumPy
    from p2p_diloco.app.text.token_shards import TokenText, is_shard_folder

    if path == STANDARD_LIBRARY:
        return open_corpus(held_out_share=held_out)
    folder = Path(path).expanduser()
    return TokenText(folder) if is_shard_folder(folder) else open_corpus(path, held_out_share=held_out)


def _describe_text(text: Text | None) -> Document:
    """Return the values that describe a folder of tokens, by dotted key; none for a text of bytes."""
    from p2p_diloco.app.text.token_shards import TokenText  # imported late: it imports NumPy

    if not isinstance(text, TokenText):
        return {}
    return {
        "data.fingerprint": text.fingerprint.hex(),
        "data.tokenizer": text.index.tokenizer,
        "model.vocabulary": text.index.vocabulary,
    }


def _tokenizer_of(text: Text | None) -> TokenizerFiles | None:
    from p2p_diloco.app.text.token_shards import TokenText  # imported late: it imports NumPy
    from p2p_diloco.app.text.tokenizer_files import decode_tokenizer

    return decode_tokenizer(text.tokenizer(), "the text's tokenizer") if isinstance(text, TokenText) else None


def _check_amount(draft: RunManifest, text: Text | None) -> list[str]:
    """Refuse a run without a plan, and a text without a window to train on or to evaluate; note a short text."""
    from p2p_diloco.app.text.data import WindowIndex
    from p2p_diloco.config.run_plan import plan_run  # imported late: it imports PyTorch

    plan = plan_run(draft)
    if text is None:
        return []
    for parts, what in ((text.train_parts, "training"), (text.held_out_parts, "held-out")):
        WindowIndex(parts, plan.context + 1, what)
    tokens = int((text.train_parts[:, 1] - text.train_parts[:, 0]).sum())
    if draft.model.weights == "loaded" or tokens >= plan.num_parameters:
        return []
    return [
        f"the text has {tokens:,} tokens to train on and the model {plan.num_parameters:,} parameters, so it will "
        "learn the text by heart; take more text or a smaller model"
    ]


def _with_files(given: Document) -> Document:
    """Return the values with the digest of the list of files, if the run shares its text."""
    path = given.get("data.path", STANDARD_LIBRARY)
    if given.get("data.share") is not True or "data.files" in given or path == STANDARD_LIBRARY:
        return given
    _check_text(str(path))
    from p2p_diloco.storage.text_copy import list_own_text  # imported late: it imports NumPy

    return given | {"data.files": list_own_text(str(path)).digest.hex()}


def _traffic_of(values: Document) -> str:
    from p2p_diloco.bandwidth.forecast import month_sentence
    from p2p_diloco.config.run_plan import plan_run  # imported late: it imports PyTorch

    sentence, _ = month_sentence(plan_run(_draft(values)).rules)
    return f"{sentence}, on every machine; longer rounds send less, and each owner can cap it"


def _spans_for(manifest: RunManifest, islands: int) -> int:
    from p2p_diloco.config.run_plan import plan_run  # imported late: it imports PyTorch

    longest = max(fragment.elements for fragment in plan_run(manifest).fragments)
    return suited_spans(longest, min(islands, manifest.membership.group_size))
