"""`p2p-diloco tokenize` and `fingerprint`: the text of a run, as shards of tokens and by its values."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from p2p_diloco.app.cli.ended_politely import ended_politely
from p2p_diloco.app.text.data import open_corpus
from p2p_diloco.app.text.token_shards import TokenText, is_shard_folder
from p2p_diloco.app.text.tokenize_text import Tokenized, TokenizeOptions, bytes_per_token, tokenize_text
from p2p_diloco.app.text.tokenizer_files import TOKENIZER, decode_tokenizer
from p2p_diloco.config.new_file import check_new_folder
from p2p_diloco.errors import StateError
from p2p_diloco.rate import counted
from p2p_diloco.storage.text_copy import list_own_text
from p2p_diloco.wording import format_bytes, own_command

SAMPLE_TOKENS = 32
MOST_FACTOR = 1.5
"""Factor by which the held-out share may differ from the wanted one without a sentence."""


def tokenize(folder: Path, options: TokenizeOptions) -> int:
    """Write a new folder of shards; return the exit code. A failure leaves nothing behind.

    Raises:
        ConfigError: the folder exists, or a source or the tokenizer cannot be read.
        StateError: the folder cannot be written.
    """
    check_new_folder(folder)
    place = folder.resolve()  # of a link, its target: a folder cannot be moved over a link
    draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    with ended_politely():
        try:
            draft.mkdir(parents=True)  # first: a place that cannot be written must not cost hours
            made = tokenize_text(options, draft, report=print)
            samples = _samples(draft)
            draft.rename(place)
        except OSError as error:
            raise StateError(f"cannot write {folder}: {error.strerror or error}") from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    _print_table(made)
    for sentence in _sentences(made, options):
        print(sentence)
    print("what the model will see, from three places:")
    for sample in samples:
        print(f"  {sample}")
    print(f"wrote {folder}; fingerprint {made.index.digest.hex()}")
    print(f"next: {own_command('new', 'run.toml', '--data.path', str(folder))}")
    return 0


def _print_table(made: Tokenized) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("source", overflow="fold")
    for title in ("files", "documents", "tokens", "held out", "bytes per token"):
        table.add_column(title, justify="right")
    for each in made.taken:
        counts = (each.files, each.documents, each.tokens, each.held_out)
        table.add_row(each.name, *(f"{count:,}" for count in counts), f"{bytes_per_token([each]):.2f}")
    Console(highlight=False, markup=False, emoji=False).print(table)


def _sentences(made: Tokenized, options: TokenizeOptions) -> Iterator[str]:
    """Yield what a reader of the table should know."""
    for what, number in made.skipped.most_common():
        yield f"left out or replaced: {number:,} × {what}"
    trained, held_out = (sum(getattr(each, key) for each in made.taken) for key in ("tokens", "held_out"))
    if unknown := sum(each.unknown for each in made.taken):
        yield f"{unknown / (trained + held_out):.2%} of the tokens stand for what the tokenizer cannot express"
    share = held_out / (trained + held_out)
    if not options.held_out / MOST_FACTOR < share < options.held_out * MOST_FACTOR:
        yield f"{share:.2%} of the tokens are held out, {options.held_out:.2%} were asked for"
    if made.index.end_token is None and options.end_token is None:
        yield "the tokenizer's files name no end of a text, so documents follow each other; set one with --end-token"
    yield f"tokens are numbers below {made.index.vocabulary:,}"


def _samples(folder: Path) -> list[str]:
    """Return the first tokens to train on, and those a third and two thirds further on, decoded, with escapes."""
    from tokenizers import Tokenizer  # imported late: it comes with an extra

    text = TokenText(folder)
    tokenizer = Tokenizer.from_str(decode_tokenizer(text.tokenizer(), str(folder)).texts[TOKENIZER])
    parts = text.train_parts
    total = int((parts[:, 1] - parts[:, 0]).sum())
    found = []
    for place in (0, total // 3, total * 2 // 3):
        start, stop = next((start, stop) for start, stop in parts if stop > place)
        first = max(int(start), place)
        ids = text.read(first, min(int(stop), first + SAMPLE_TOKENS)).tolist()
        found.append(json.dumps(tokenizer.decode(ids, skip_special_tokens=False), ensure_ascii=False))
    return found


def print_fingerprint(path: str) -> int:
    """Print lines for the section [data] of a run file; return the exit code, 0.

    Raises:
        ConfigError: the text is missing or too short, or a name cannot be shared.
    """
    tokens = TokenText(Path(path).expanduser()) if is_shard_folder(Path(path).expanduser()) else None
    fingerprint = open_corpus(path).fingerprint if tokens is None else tokens.fingerprint
    own = list_own_text(path)
    assert own.listed is not None, "it was just made"
    size = f"{counted(len(own.listed.files), 'file')}, {format_bytes(own.listed.num_bytes)}"
    print(f'fingerprint = "{fingerprint.hex()}"  # {size}')
    if tokens is not None:
        print(f'tokenizer = "{tokens.index.tokenizer}"')
    print(f'files = "{own.digest.hex()}"  # for share = true')
    return 0
