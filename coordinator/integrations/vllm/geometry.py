"""From vLLM's KV tensors to a pool.

vLLM has a tensor for each layer, of a shape that its attention backend chooses. A block of vLLM is a page
here. Known shapes are described to the coordinator as what they are; then engines of different TP sizes
can exchange blocks. Any other shape, in which a block of a layer is one piece of memory, is *opaque*: such
a block is only ever copied as a whole, between engines of the same TP size and the same block length.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from coordinator.client.pool import KVPool
from coordinator.errors import PoolError
from coordinator.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

Kv = Literal["apart", "together", "latent"]
Order = Literal["tokens", "heads"]

#: K and V of a layer are in tensors, or halves of one, of their own.
_HALVES: Final = 2


class Cache(NamedTuple):
    """What vLLM says of its KV cache.

    Attributes:
        blocks: how many blocks there are.
        block_tokens: tokens in a block.
        kv_heads: of the model, over all TP ranks.
        head_size: values per head.
        latent: latent attention (MLA): one head, which all ranks hold.
        tp: TP ranks.

    """

    blocks: int
    block_tokens: int
    kv_heads: int
    head_size: int
    latent: bool
    tp: int

    @property
    def heads(self) -> int:
        """Heads on each rank."""
        return max(1, self.kv_heads // self.tp)


def pool_of(tensors: Mapping[str, torch.Tensor], cache: Cache, rank: int) -> KVPool:
    """Wrap the KV tensors of one TP rank, which are named as their layers.

    Raises:
        LayoutError: the layout is impossible.
        PoolError: the tensors are not such that a block of a layer is in one piece, or two.

    """
    layers = _in_order(tensors)
    if not layers:
        message = "vLLM has given no KV tensors"
        raise PoolError(message)
    shapes = {(tuple(layer.shape), tuple(layer.stride()), str(layer.dtype)) for layer in layers}
    if len(shapes) > 1:
        message = f"the layers' KV tensors differ: {', '.join(map(str, sorted(shapes)))}"
        raise PoolError(message)
    layers = [_as_in_memory(layer) for layer in layers]
    layout = layout_of(layers[0], len(layers), cache)
    return KVPool.wrap(layers, layout, cache.tp, rank)


def layout_of(layer: torch.Tensor, layers: int, cache: Cache) -> Layout:
    """Describe a layer's tensor, whose dimensions are in the order of the memory.

    Raises:
        PoolError: a block of a layer is not in one piece, or two.

    """
    shape = list(layer.shape)
    apart = shape[0] == _HALVES and shape[0] % cache.blocks != 0
    block_dimension = 1 if apart else 0
    if len(shape) <= block_dimension or shape[block_dimension] % cache.blocks:
        message = (
            f"a layer's KV tensor is {shape} in memory: this cannot be cut into {cache.blocks} blocks, "
            f"each in one piece; choose another attention backend or KV cache layout"
        )
        raise PoolError(message)
    inner = _without_ones(shape[block_dimension + 1 :])
    dtype = str(layer.dtype).removeprefix("torch.")
    whole = shape[block_dimension] == cache.blocks
    for kv, order, known in _known(cache, apart=apart) if whole else ():
        if inner == _without_ones(known):
            heads = 1 if kv == "latent" else cache.kv_heads
            return Layout(layers, cache.block_tokens, heads, cache.head_size, dtype, kv, order=order)
    # Heads of one byte row each: as many as there are ranks, so that other TP sizes do not fit.
    token_bytes, rest = divmod(layer.nbytes, cache.blocks * cache.block_tokens * _HALVES)
    if rest:
        message = f"a layer's KV tensor of {layer.nbytes} bytes is no whole number of bytes for each token"
        raise PoolError(message)
    pieces: Kv = "apart" if apart else "together"
    return Layout(layers, cache.block_tokens, cache.tp, token_bytes, "uint8", pieces, order="heads")


def _known(cache: Cache, *, apart: bool) -> Sequence[tuple[Kv, Order, list[int]]]:
    """Return how ``kv``, ``order`` and the dimensions of a block belong together."""
    heads, tokens, size = cache.heads, cache.block_tokens, cache.head_size
    if cache.latent:
        return [] if apart else [("latent", "tokens", [tokens, size])]
    if heads == tokens:
        return []  # Nobody can tell one dimension from the other.
    if apart:
        return [("apart", "tokens", [tokens, heads, size]), ("apart", "heads", [heads, tokens, size])]
    return [
        ("together", "tokens", [_HALVES, tokens, heads, size]),
        ("together", "heads", [heads, tokens, _HALVES * size]),
    ]


def _in_order(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return each layer's tensor, by the numbers in its name; one that layers share only once."""
    found: dict[int, torch.Tensor] = {}
    for name in sorted(tensors, key=_numbers):
        found.setdefault(tensors[name].data_ptr(), tensors[name])
    return list(found.values())


def _numbers(name: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", name)], name


def _as_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Bring the dimensions into the order of the memory."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: (-strides[dimension], dimension))
    return tensor.permute(order)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
