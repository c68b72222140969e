"""Write a base model: a small Llama of bytes. It stands for a trained model, such as one of the hub."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Write the folder base."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained("base")
    print("wrote the folder base")


if __name__ == "__main__":
    main()
