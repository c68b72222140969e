"""Write what an organiser brings: documents, a tokenizer, and the configuration of a Llama of about 2M parameters."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

VOCABULARY, CONTEXT = 2048, 128


def main() -> None:
    """Use the source code of Python's standard library as documents, so that nothing is downloaded."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    documents = [file.read_text(errors="replace") for file in files]
    Path("documents.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained("llama")
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    ).save_pretrained("llama")
    print(f"wrote documents.jsonl with {len(documents)} documents, and the folder llama")


if __name__ == "__main__":
    main()
