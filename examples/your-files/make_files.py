"""Write a folder with one file of each kind, and a tokenizer. Nothing is downloaded."""

from __future__ import annotations

import csv
import gzip
import json
import sysconfig
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def lines(texts: list[str]) -> str:
    """Return JSON lines."""
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def main() -> None:
    """Use the source code of Python's standard library as texts."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(errors="replace") for file in files]
    mix = Path("mix")
    (mix / "year=2024").mkdir(parents=True)
    (mix / "plain.txt").write_text(texts[0])
    (mix / "windows.txt").write_bytes(texts[8].encode("utf-16"))
    (mix / "lines.jsonl").write_text(lines(texts[1::8]))
    (mix / "c4.json.gz").write_bytes(gzip.compress(lines(texts[2::8]).encode()))
    (mix / "array.json").write_text(json.dumps([{"text": text} for text in texts[3::8]], indent=1))
    parquet.write_table(pa.table({"text": texts[4::8]}), mix / "table.parquet")
    with (mix / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["number", "text"], *enumerate(texts[5::8])])
    (mix / "year=2024" / "more.jsonl").write_text(lines(texts[6::8]))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained("words")
    print("wrote mix, a folder with eight files, and the tokenizer words")


if __name__ == "__main__":
    main()
