"""The parts of the vLLM connector that need no vLLM: settings, rooms, geometry, the proxy's contract."""

from __future__ import annotations

import asyncio

import pytest
import torch
from aiohttp import web

from coordinator.errors import ConfigError, PoolError
from coordinator.integrations.vllm.geometry import Cache, pool_of
from coordinator.integrations.vllm.proxy import application, for_decode, for_prefill
from coordinator.integrations.vllm.rooms import room_of
from coordinator.integrations.vllm.settings import ConnectorSettings

ADDRESS = "ipc:///run/kv-coordinator/control"
BLOCKS, TOKENS, HEADS, SIZE = 6, 16, 4, 8


def cache(*, tp: int = 1, latent: bool = False, size: int = SIZE, tokens: int = TOKENS) -> Cache:
    """What vLLM says of its cache."""
    return Cache(BLOCKS, tokens, 1 if latent else HEADS, size, latent, tp)


def layers(*shape: int, order: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
    """Eleven layers' tensors of a shape; ``order``: of its dimensions in the memory."""
    order = order or tuple(range(len(shape)))
    back = tuple(order.index(dimension) for dimension in range(len(shape)))
    found = {
        f"model.layers.{number}.self_attn.attn": torch.zeros([shape[index] for index in order]).permute(back)
        for number in range(11)
    }
    # vLLM's order is not that of the layers.
    return dict(sorted(found.items()))


# --- geometry --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "order", "kv", "rows"),
    [
        ((BLOCKS, HEADS, TOKENS, 2 * SIZE), None, "together", "heads"),
        ((BLOCKS, 2, TOKENS, HEADS, SIZE), None, "together", "tokens"),
        ((2, BLOCKS, TOKENS, HEADS, SIZE), None, "apart", "tokens"),
        ((2, BLOCKS, TOKENS, HEADS, SIZE), (0, 1, 3, 2, 4), "apart", "heads"),
        ((2, BLOCKS, TOKENS, HEADS, SIZE), (1, 0, 2, 3, 4), "together", "tokens"),
    ],
)
def test_known_shapes_are_described(
    shape: tuple[int, ...], order: tuple[int, ...] | None, kv: str, rows: str
) -> None:
    pool = pool_of(layers(*shape, order=order), cache(), 0)
    layout = pool.layout
    assert (layout.kv, layout.order, layout.kv_heads, layout.head_size) == (kv, rows, HEADS, SIZE)
    assert (layout.layers, layout.page_tokens, layout.dtype, pool.pages) == (11, TOKENS, "float32", BLOCKS)


def test_the_layers_are_in_order() -> None:
    tensors = layers(BLOCKS, HEADS, TOKENS, 2 * SIZE)
    pool = pool_of(tensors, cache(), 0)
    assert [region.address for region in pool.regions] == [
        tensors[f"model.layers.{number}.self_attn.attn"].data_ptr() for number in range(11)
    ]


def test_latent_attention_is_described() -> None:
    layout = pool_of(layers(BLOCKS, TOKENS, 72), cache(latent=True, size=72, tp=2), 1).layout
    assert (layout.kv, layout.kv_heads, layout.head_size) == ("latent", 1, 72)


@pytest.mark.parametrize(
    "shape", [(BLOCKS, 2, HEADS, TOKENS, SIZE), (2 * BLOCKS, 2, TOKENS // 2, HEADS, SIZE)]
)
def test_other_shapes_are_opaque_and_fit_no_other_tp_size(shape: tuple[int, ...]) -> None:
    """Also kernel blocks that are shorter than vLLM's."""
    layout = pool_of(layers(*shape), cache(), 0).layout
    assert (layout.kv_heads, layout.dtype, layout.head_size) == (1, "uint8", HEADS * SIZE * 4)
    half = [shape[0], *(size // 2 if size == HEADS else size for size in shape[1:])]
    other = pool_of(layers(*half), cache(tp=2), 0).layout
    assert other.kv_heads == 2
    assert pool_of(layers(*shape), cache(), 0).pages == BLOCKS


def test_heads_and_tokens_of_the_same_number_are_not_guessed() -> None:
    assert pool_of(layers(BLOCKS, HEADS, HEADS, 2 * SIZE), cache(tokens=HEADS), 0).layout.dtype == "uint8"


def test_blocks_in_many_pieces_are_refused() -> None:
    with pytest.raises(PoolError, match="cannot be cut into 6 blocks"):
        pool_of(layers(TOKENS, BLOCKS, HEADS, 2 * SIZE), cache(), 0)


# --- rooms and settings ------------------------------------------------------------------------------


def test_a_number_is_its_own_room_and_a_text_has_always_the_same() -> None:
    assert room_of("17") == room_of(17) == 17
    assert room_of("cmpl-1") == room_of("cmpl-1") != room_of("cmpl-2")
    assert all(0 < room_of(text) < 2**64 for text in ("0", "", "-1", str(2**64), "²"))


@pytest.mark.parametrize("transfer_id", ["1" * 5000, "\ud800"])
def test_whatever_a_client_names_its_transfer_it_has_a_room(transfer_id: str) -> None:
    """An exception here would end the engine for all others."""
    assert 0 < room_of(transfer_id) < 2**64
    assert room_of("0" * 5000 + "17") == 17


def test_all_mistakes_in_the_settings_are_told() -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectorSettings.read(
            {"coordinator": [ADDRESS, ADDRESS], "grup": "x", "queued_s": 0, "one_reporter": 1}, sends=True
        )
    told = "\n".join(caught.value.problems)
    for part in (
        "grup: is not known",
        "group: is missing",
        "prefill engine has one",
        "queued_s",
        "one_reporter",
    ):
        assert part in told


def test_settings_have_defaults() -> None:
    settings = ConnectorSettings.read(
        {"coordinator": ADDRESS, "group": "north", "advertise": "tcp://a:1"}, sends=True
    )
    assert (settings.coordinators, settings.advertise, settings.backend) == ((ADDRESS,), "tcp://a:1", "nixl")
    with pytest.raises(ConfigError, match="only one is given"):
        ConnectorSettings.read({"coordinator": ADDRESS, "group": "north", "client_key": "/k"}, sends=False)


# --- the proxy -----------------------------------------------------------------------------------------


def test_the_proxy_asks_prefill_for_one_token_and_hands_its_answer_to_decode() -> None:
    body = {"prompt": "x", "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}}
    asked = for_prefill(body, "t-1")
    assert asked == {
        "prompt": "x", "max_tokens": 1, "stream": False, "n": 1,
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "t-1"},
    }  # fmt: skip
    given = {"do_remote_prefill": True, "transfer_id": "t-1"}
    assert for_decode(body, {"kv_transfer_params": given}) == body | {"kv_transfer_params": given}
    assert for_decode(body, {}) == body


async def served(answer: bytes) -> asyncio.Server:
    """Serve as an engine that gives this answer to each request, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


async def through_proxy(body: bytes, decode: bytes) -> bytes:
    """All that a client hears of a proxy whose decode engine answers so."""
    heads = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    async with await served(heads) as prefill, await served(decode) as decoding:
        urls = [[f"http://127.0.0.1:{port_of(server)}"] for server in (prefill, decoding)]
        runner = web.AppRunner(application(*urls))
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            reader, writer = await asyncio.open_connection(*runner.addresses[0])
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
            try:
                return await reader.read(-1)
            except ConnectionResetError:
                return b"(broken off)"
            finally:
                writer.close()
        finally:
            await runner.cleanup()


async def test_an_answer_that_decode_breaks_off_is_broken_off_by_the_proxy() -> None:
    """Another answer in the middle of it would be read as a part of it."""
    begun = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    heard = await through_proxy(b"{}", begun)
    assert heard.count(b"HTTP/1.1") <= 1
    assert not heard.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff"])
async def test_a_body_that_is_no_json_object_is_the_clients_fault(body: bytes) -> None:
    assert (await through_proxy(body, b"")).startswith(b"HTTP/1.1 400 ")
