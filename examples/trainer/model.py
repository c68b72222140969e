"""The model and the text that all peers build alike: a small Llama that reads bytes, and Python's standard library."""

import os
import sysconfig
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BLOCK = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, which needs no file and is the same everywhere."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_model() -> LlamaForCausalLM:
    """Return it untrained; what it starts from matters only for the peer that founds the run."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=BLOCK,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def make_datasets(tokenizer: PreTrainedTokenizerFast, num_files: int = 40) -> tuple[Dataset, Dataset]:
    """Return blocks of tokens to train on, and others to evaluate on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder / name for name in os.listdir(folder) if name.endswith(".py"))[:num_files]
    tokens = tokenizer("".join(file.read_text(encoding="utf-8") for file in files))["input_ids"]
    blocks = [tokens[start : start + BLOCK] for start in range(0, len(tokens) - BLOCK, BLOCK)]
    parts = Dataset.from_dict({"input_ids": blocks, "labels": blocks}).train_test_split(128, seed=0)
    return parts["train"], parts["test"]
