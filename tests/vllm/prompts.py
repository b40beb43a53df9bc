"""The prompts that tests hand over."""

from __future__ import annotations

import random
from typing import Final

from tests.vllm.rig import BLOCK_TOKENS

#: The tiny model's vocabulary, without its end token.
VOCABULARY: Final = 256


def prompt(seed: int, tokens: int) -> list[int]:
    """Random tokens, always the same for a seed."""
    return random.Random(seed).choices(range(VOCABULARY), k=tokens)


def twenty() -> list[list[int]]:
    """Twenty prompts of 1 to 2,000 tokens: around the ends of blocks, and with a common prefix."""
    ends = [1, 2, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS]
    lengths = [*ends, 50, 100, 127, 128, 300, 512, 777, 1000, 1500, 2000]
    common = prompt(1000, 5 * BLOCK_TOKENS)
    tails = [1, BLOCK_TOKENS, 45, 400]
    return [
        *(prompt(seed, tokens) for seed, tokens in enumerate(lengths)),
        *(common + prompt(2000 + seed, tokens) for seed, tokens in enumerate(tails)),
    ]
