"""`p2p-diloco fingerprint`: print the values by which a run names a text."""

from __future__ import annotations

from pathlib import Path

from p2p_diloco.rate import counted
from p2p_diloco.storage.text_copy import list_own_text
from p2p_diloco.training.data import open_corpus
from p2p_diloco.training.token_shards import TokenText, is_shard_folder
from p2p_diloco.wording import format_bytes


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
