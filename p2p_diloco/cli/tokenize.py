"""`p2p-diloco tokenize` and `fingerprint`: the text of a run, as shards of tokens and by its values."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from p2p_diloco.config.new_file import check_new_folder
from p2p_diloco.config.own_command import own_command
from p2p_diloco.errors import StateError
from p2p_diloco.rate import counted
from p2p_diloco.storage.text_copy import list_own_text
from p2p_diloco.text.data import open_corpus
from p2p_diloco.text.token_shards import TokenText, is_shard_folder, total_tokens
from p2p_diloco.text.tokenize_text import TokenizeOptions, tokenize_text
from p2p_diloco.wording import format_bytes


def tokenize(folder: Path, options: TokenizeOptions) -> int:
    """Write a new folder of shards; return the exit code. A failure leaves nothing behind.

    Raises:
        ConfigError: the folder exists, or a source or the tokenizer cannot be read.
        StateError: the folder cannot be written.
    """
    check_new_folder(folder)
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        index = tokenize_text(options, draft, report=print)
        draft.rename(folder)
    except OSError as error:
        raise StateError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    trained = total_tokens([shard for source in index.sources for shard in source.shards])
    print(
        f"wrote {folder}: {trained:,} tokens to train on, {total_tokens(index.held_out):,} to evaluate on, "
        f"{index.bytes_per_token:.3g} bytes each; {index.vocabulary:,} different ones"
    )
    print(f"fingerprint {index.digest.hex()}")
    print(f"next: {own_command('new', 'run.toml', '--data.path', str(folder))}")
    return 0


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
