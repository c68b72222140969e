"""`p2p-diloco tokenize`: make a folder of token shards that a run can train on."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from p2p_diloco.config.new_file import check_new_folder
from p2p_diloco.config.own_command import own_command
from p2p_diloco.errors import StateError
from p2p_diloco.training.token_shards import total_tokens
from p2p_diloco.training.tokenize_text import TokenizeOptions, tokenize_text


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
