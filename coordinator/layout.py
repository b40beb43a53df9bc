"""The geometry of an engine's KV cache, of one rank's part of it, and whether two of them fit.

An engine has ``tp`` ranks in each of its pipeline stages: rank ``r`` is number ``r % tp`` of stage
``r // tp``. A stage holds its layers, in order. The KV heads are split over the ranks of a stage; where
there are more ranks than heads, each head is on several ranks in a row (``Share.copy`` tells which copy
it is). Latent attention (MLA) is the same with one head, which all ranks hold.

A pool of one rank is one contiguous buffer, made of *sections*, one after the other: first K and V,
then each extra buffer. A section is layer first: planes, each of ``pages`` pages, each of ``rows`` rows,
each of the rank's heads side by side, each of ``head_size`` values. There is a row for each token of the
page; or, with ``order = "heads"``, a single row, in which each head has the values of all tokens. A plane
is the K or the V of a layer (``kv = "apart"``), both in one page, the rows of K before those of V
(``"together"``), or the latent of a layer (``"latent"``).

This module does no arithmetic on page lists (the worker's planner does), so that the coordinator
can use it without numpy.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from coordinator.errors import LayoutError

#: Bytes per value, by the names that engines use.
DTYPE_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
#: Most pipeline stages, and most buffers of a layer beside its K and V.
MAX_STAGES: Final = 64
MAX_EXTRAS: Final = 8
_MAX_SIZE: Final = 2**20
#: Planes of a layer, rows for each token in a page of one.
_SHAPES: Final = {"apart": (2, 1), "together": (1, 2), "latent": (1, 1)}


class Extra(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a layer has beside its K and V, such as their scales: one plane, split over the ranks as they are.

    Attributes:
        name: any, different from those of other extras.
        head_size: values for each token and head.
        dtype: a key of ``DTYPE_BYTES``.

    """

    name: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[A-Za-z0-9._-]+\Z")]
    head_size: int
    dtype: Annotated[str, msgspec.Meta(max_length=32)]

    def __str__(self) -> str:
        return f"{self.name} ({self.head_size} x {self.dtype})"


class Section(NamedTuple):
    """A kind of buffer that each layer has, with what all ranks have in common of it.

    Attributes:
        planes: of each layer.
        rows: of each page.
        head_bytes: length of one head in a row.

    """

    planes: int
    rows: int
    head_bytes: int


class Share(NamedTuple):
    """What one rank holds.

    Attributes:
        first_layer: counted over the whole model.
        layers: how many.
        first_head: counted over the whole model.
        heads: how many.
        copy: which copy of its heads it has; 0 where every head is on one rank.
        copies: how many there are.

    """

    first_layer: int
    layers: int
    first_head: int
    heads: int
    copy: int
    copies: int


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one engine's KV cache looks like, over all its ranks.

    Attributes:
        layers: transformer layers of the model, over all pipeline stages.
        page_tokens: tokens in a page.
        kv_heads: KV heads of the model, over all TP ranks; 1 with ``latent``.
        head_size: values per head. With ``latent``: of the latent and its rotary part.
        dtype: a key of ``DTYPE_BYTES``.
        kv: K and V of a layer in planes of their own (``apart``), in one page (``together``), or one
            latent for both, the same on all TP ranks (``latent``).
        stages: layers of each pipeline stage; empty: there is one stage.
        extras: further buffers of each layer.
        order: in a page, the heads of a token are side by side (``tokens``), or the tokens of a head
            (``heads``). Then the heads that a rank of another TP size needs are in one piece.

    """

    layers: int
    page_tokens: int
    kv_heads: int
    head_size: int
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    kv: Literal["apart", "together", "latent"] = "apart"
    stages: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    extras: Annotated[tuple[Extra, ...], msgspec.Meta(max_length=MAX_EXTRAS)] = ()
    order: Literal["tokens", "heads"] = "tokens"

    def check(self, world_size: int) -> None:
        """Refuse an impossible layout for a group of ``world_size`` ranks.

        Raises:
            LayoutError: naming every field that is wrong, its value and what is accepted.

        """
        problems = self._bad_sizes() or [*self._bad_stages(world_size), *self._bad_heads(world_size)]
        if problems:
            raise LayoutError("; ".join(problems))

    @property
    def planes(self) -> int:
        """Planes of K and V, over all stages: one per layer, or two when K and V are apart."""
        return self.layers * _SHAPES[self.kv][0]

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections of every rank's pool, in order; the first one is K and V."""
        planes, rows = _SHAPES[self.kv]
        by_tokens = (
            Section(planes, rows * self.page_tokens, self.head_size * DTYPE_BYTES[self.dtype]),
            *(
                Section(1, self.page_tokens, extra.head_size * DTYPE_BYTES[extra.dtype])
                for extra in self.extras
            ),
        )
        if self.order == "tokens":
            return by_tokens
        return tuple(Section(planes, 1, rows * head_bytes) for planes, rows, head_bytes in by_tokens)

    def tp(self, world_size: int) -> int:
        """Ranks in each stage."""
        return world_size // max(1, len(self.stages))

    def share(self, world_size: int, rank: int) -> Share:
        """Say what a rank holds; the layout must have passed ``check``."""
        tp = self.tp(world_size)
        stages = self.stages or (self.layers,)
        stage, number = divmod(rank, tp)
        heads, copies = max(1, self.kv_heads // tp), max(1, tp // self.kv_heads)
        group, copy = divmod(number, copies)
        return Share(sum(stages[:stage]), stages[stage], group * heads, heads, copy, copies)

    def page_bytes(self, world_size: int) -> int:
        """Bytes of one page in one plane of K and V on one rank."""
        section = self.sections[0]
        return section.rows * section.head_bytes * self.share(world_size, 0).heads

    def pool_bytes(self, pages: int, world_size: int, rank: int = 0) -> int:
        """Bytes of one rank's pool of ``pages`` pages."""
        share = self.share(world_size, rank)
        a_layer = sum(section.planes * section.rows * section.head_bytes for section in self.sections)
        return pages * share.layers * share.heads * a_layer

    def _bad_sizes(self) -> list[str]:
        """What is wrong with single values."""
        sizes = {
            field: getattr(self, field) for field in ("layers", "page_tokens", "kv_heads", "head_size")
        } | {f"extras.{extra.name}.head_size": extra.head_size for extra in self.extras}
        problems = [
            f"{field} is {value}, must be from 1 to 2**20"
            for field, value in sizes.items()
            if not 1 <= value <= _MAX_SIZE
        ]
        dtypes = {"dtype": self.dtype} | {f"extras.{extra.name}.dtype": extra.dtype for extra in self.extras}
        problems += [
            f"{field} is {dtype!r}, must be one of {', '.join(DTYPE_BYTES)}"
            for field, dtype in dtypes.items()
            if dtype not in DTYPE_BYTES
        ]
        names = [extra.name for extra in self.extras]
        if len(set(names)) < len(names):
            problems.append(f"extras are {', '.join(names)}: each must have a name of its own")
        return problems

    def _bad_stages(self, world_size: int) -> list[str]:
        """What is wrong with the pipeline."""
        problems = []
        if self.stages and (min(self.stages) < 1 or sum(self.stages) != self.layers):
            problems.append(
                f"stages is {list(self.stages)}, must be layers of each stage, {self.layers} in all"
            )
        if self.stages and world_size % len(self.stages):
            problems.append(f"world_size is {world_size}, must divide by the {len(self.stages)} stages")
        return problems

    def _bad_heads(self, world_size: int) -> list[str]:
        """What is wrong with the heads."""
        problems = []
        if self.kv == "latent" and self.kv_heads != 1:
            problems.append(f"kv_heads is {self.kv_heads}, must be 1 when kv is 'latent'")
        # What is wrong with the stages is told by itself.
        tp = max(1, self.tp(world_size))
        if self.kv_heads % tp and tp % self.kv_heads:
            problems.append(f"kv_heads is {self.kv_heads}, must divide by the {tp} TP ranks, or they by it")
        return problems


def mismatches(prefill: Layout, decode: Layout) -> list[str]:
    """Every field in which the two sides do not fit, with both values; empty when they fit.

    World sizes and stages may differ: two layouts that are possible by themselves, and alike in the
    rest, can always exchange pages.
    """
    return [
        f"{field}: prefill has {_told(getattr(prefill, field))}, decode has {_told(getattr(decode, field))}"
        for field in Layout.__struct_fields__
        if field != "stages" and getattr(prefill, field) != getattr(decode, field)
    ]


def _told(value: object) -> str:
    """Write a field's value for people."""
    return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else repr(value)
