"""`config.json` and `generation_config.json` of an export, with the tokens of the run's tokenizer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from p2p_diloco.app.text.tokenizer_files import GENERATION_CONFIG, TokenizerFiles


def token_ids(tokenizer: TokenizerFiles | None, vocabulary: int) -> dict[str, Any]:
    """Return the values of `config.json` that name the begin, end and padding tokens of a run's tokenizer.

    A configuration comes with the ids of another tokenizer, or with its architecture's defaults, so all three are
    always set: None where the tokenizer names no such token.

    Args:
        tokenizer: the files of the run's tokenizer; None: each byte is a token, and none has a meaning.
        vocabulary: number of tokens of the model; ids beyond them are left out.
    """
    if tokenizer is None:
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    special = tokenizer.special()
    begin, pad = (one if one is not None and one < vocabulary else None for one in (special.begin, special.pad))
    ends = [one for one in special.ends if one < vocabulary]
    return {
        "bos_token_id": begin,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": pad,
    }


def config_files(config: Mapping[str, Any], tokenizer: TokenizerFiles | None) -> dict[str, bytes]:
    """Return both files, by name.

    Args:
        config: the configuration of the model; it may lack a `vocab_size` that is its architecture's own. Its begin and
            end tokens are replaced; a padding token is kept, because some architectures count positions from it.
        tokenizer: the files of the run's tokenizer; None: each byte is a token.
    """
    ids = token_ids(tokenizer, config.get("vocab_size", sys.maxsize))
    structural = {key: config[key] for key in ("pad_token_id",) if config.get(key) is not None}
    files = {
        "config.json": {**config, **ids, **structural},
        GENERATION_CONFIG: {key: one for key, one in ids.items() if one is not None},
    }
    return {name: f"{json.dumps(document, indent=2)}\n".encode() for name, document in files.items()}
