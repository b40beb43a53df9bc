# ruff: noqa: INP001 - scripts/ holds programs and is no package
"""Make a tiny model with random weights, for the demo and the tests: ``vllm_model.py DIRECTORY``.

A Llama of two layers, with a tokenizer of one token for each byte. Its answers mean nothing; they depend on
all of the prompt, which is what a test of a KV cache needs. Runs in the environment of ``scripts/vllm-env``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LONGEST = 4096


def main() -> None:
    """Write the model and its tokenizer into the directory that the first argument names."""
    place = Path(sys.argv[1])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)} | {"<end>": len(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(place)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONGEST,
        # Large, so that no two tokens are nearly as likely.
        initializer_range=0.5,
        eos_token_id=len(alphabet),
        bos_token_id=len(alphabet),
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(place)


if __name__ == "__main__":
    main()
