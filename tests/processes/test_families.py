"""Five families of models, each trained by two peers, exported, and asked for a text to its end: `make files`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.status.status_file import PeerStatus
from tests.processes.machines import Machines, wait_for_end

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(600)]

TOKENIZER_PROGRAM = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
made = Tokenizer(models.BPE())
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
made.train_from_iterator(open("chats.jsonl"), trainer)
template = "{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n{% endfor %}"
end = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **end).save_pretrained("chat")
"""
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, **HEADS, "tie_word_embeddings": True},
    "qwen3": {**SIZES, **HEADS, "head_dim": 16},
    "gemma2": {**SIZES, **HEADS, "head_dim": 16, "sliding_window": 32},
    "gpt2": {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "mamba": {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    pytest.importorskip("transformers", reason='pip install "p2p-diloco[hf]" brings it; make files runs this')
    machines = Machines(tmp_path)
    chats = [
        [{"role": "user", "content": f"What is {a} and {b}?"}, {"role": "assistant", "content": f"{a + b}."}]
        for a in range(60)
        for b in range(60)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"text": chat}) + "\n" for chat in chats))
    machines.run(program=("-c", TOKENIZER_PROGRAM))
    machines.run("tokenize", "tokens", "chats.jsonl", "--tokenizer", "chat")
    yield machines
    machines.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_peers_train_it_and_its_export_ends_each_turn(machines: Machines, family: str) -> None:
    import transformers

    (machines.folder / family).mkdir()
    config = {"model_type": family, "eos_token_id": 7, "bos_token_id": 8, **FAMILIES[family]}
    (machines.folder / family / "config.json").write_text(json.dumps(config))
    rate = ["--inner.learning_rate", "3e-3", "--model.context", "64"]
    rounds = ["--rounds.round_seconds", "2", "--rounds.fragments", "2", "--data.share", "true"]
    machines.run("new", "--model", f"hf:{family}", "--data.path", "tokens", *rate, *rounds)
    machines.start("ann", "join", "--found", "run.toml", "--until-round", "50")
    machines.start("bob", "join", machines.invite("ann"), "--until-round", "50")
    wait_for_end(machines, ["ann", "bob"])
    status: list[PeerStatus] = [machines.status(name) for name in ("ann", "bob")]
    assert status[0].state_digest == status[1].state_digest, machines.story()
    assert min(each.entries_absorbed for each in status) > 20

    machines.run("export", "model", "--state-directory", str(machines.state("bob")))
    model = transformers.AutoModelForCausalLM.from_pretrained(machines.folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(machines.folder / "model")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.chat_template
    assert (tokenizer.pad_token, tokenizer.eos_token_id) == ("<pad>", end)
    assert model.generation_config.eos_token_id in (end, [end])
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    asked = [[{"role": "user", "content": f"What is {a} and {a + 3}?"}] for a in range(60)]
    num_ended = 0
    for chat in asked:
        prompt = tokenizer.apply_chat_template(chat, tokenize=False) + "<|im_start|>assistant\n"
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        written = model.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :].tolist()
        num_ended += written[-1] == end
        assert len(written) == 40 or written[-1] == end, "it stops at no other token"
    print(f"{family}: {num_ended} of {len(asked)} texts end with a turn; the others at 40 tokens")
    assert num_ended > 50
