"""The wire: every message survives it, and nothing that is no message gets through or blows up."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import messages
from coordinator.errors import ProtocolError
from coordinator.layout import Layout
from coordinator.messages import (
    MAX_AUX_BYTES,
    MAX_ITEMS,
    MAX_NAME,
    MAX_WORLD,
    VERSION,
    Broadcast,
    Bye,
    Cancel,
    Extend,
    FromPeer,
    Hello,
    Item,
    MoveDone,
    MoveFailed,
    MoveSettled,
    Offer,
    Open,
    Pool,
    Process,
    Progress,
    Report,
    Role,
    Send,
    Submit,
    ToRank,
    ToWorker,
    WorkerHello,
    decode_broadcast,
    decode_from_peer,
    decode_to_rank,
    decode_to_worker,
    encode,
)

from .wire import HIGHEST, LOWEST, values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Which decoder reads which messages.
CONVERSATIONS: Final[dict[Callable[[bytes], Any], tuple[type[msgspec.Struct], ...]]] = {
    decode_from_peer: get_args(FromPeer),
    decode_to_rank: get_args(ToRank),
    decode_to_worker: get_args(ToWorker),
    decode_broadcast: (Broadcast,),
}
EVERY_WAY: Final = [(decode, kind) for decode, kinds in CONVERSATIONS.items() for kind in kinds]

HELLO: Final = Hello(
    version=VERSION,
    role=Role.PREFILL,
    group="prefill-0",
    rank=1,
    world_size=2,
    instance=99,
    process=Process(123, "boot", 456),
    backend="loopback",
    layout=Layout(4, 16, 8, 128, "bfloat16"),
    pool=Pool("/pools/kv-coordinator-x", 1 << 20, 64),
    endpoint=b"",
)
ITEMS: Final[dict[type[msgspec.Struct], Item]] = {
    Open: Open(7, 3),
    Send: Send(7, 3, b"\x01\0\0\0", last=True, aux=b"first token"),
    Offer: Offer(7, 3, b"\x02\0\0\0", 5),
    Extend: Extend(7, 3),
    Cancel: Cancel(7, 3, "the client went away"),
}
WORKER: Final = WorkerHello(VERSION, b"t" * 32, 123)


def plain(message: msgspec.Struct) -> list[Any]:
    """A message as the list that goes over the wire; its tag stands first."""
    fields: list[Any] = msgspec.msgpack.decode(encode(message))
    return fields


def changed(message: msgspec.Struct, **fields: object) -> list[Any]:
    """The list of a message in which some fields were replaced by whatever is given."""
    listed = plain(message)
    for name, value in fields.items():
        listed[message.__struct_fields__.index(name) + 1] = value
    return listed


def item_with(kind: type[msgspec.Struct], **fields: object) -> list[Any]:
    """A submit whose one item was changed."""
    return changed(submit_of([]), items=[changed(ITEMS[kind], **fields)])


def report_with(report: Report, **fields: object) -> list[Any]:
    return ["reports", [changed(report, **fields)]]


def submit_of(items: list[Item]) -> Submit:
    return Submit(epoch=5, first=1, acknowledged=2, applied=1, listening=True, items=items)


# --- round trips -----------------------------------------------------------------------------


@pytest.mark.parametrize(("decode", "kind"), EVERY_WAY, ids=[kind.__name__ for _, kind in EVERY_WAY])
def test_every_message_survives_the_wire(decode: Callable[[bytes], Any], kind: type[msgspec.Struct]) -> None:
    @settings(max_examples=25)
    @given(values(kind))
    def survives(message: msgspec.Struct) -> None:
        assert decode(encode(message)) == message

    survives()


def test_every_message_with_a_tag_is_in_a_conversation() -> None:
    """A message that no decoder knows would be sent and never read."""
    everything = {
        thing
        for thing in vars(messages).values()
        if isinstance(thing, type) and issubclass(thing, msgspec.Struct) and thing.__struct_config__.tag
    }
    inner = {*get_args(Item), *get_args(Report), *get_args(messages.Command), *get_args(messages.Event)}
    assert everything == inner.union(*CONVERSATIONS.values())


def test_tags_are_told_apart() -> None:
    for kinds in (*CONVERSATIONS.values(), get_args(Item), get_args(Report), get_args(messages.Command)):
        tags = [kind.__struct_config__.tag for kind in kinds]
        assert len(set(tags)) == len(tags), tags


# --- bounds ----------------------------------------------------------------------------------


def layout_of(*more: object) -> list[Any]:
    """A hello with further fields in its layout."""
    return changed(HELLO, layout=[4, 16, 8, 128, "int8", "apart", *more])


TOO_MUCH: Final[list[tuple[str, Sequence[Any], str]]] = [
    ("a rank below 0", changed(HELLO, rank=-1), ">= 0"),
    ("a rank number of its own", changed(HELLO, rank=MAX_WORLD), f"<= {MAX_WORLD - 1}"),
    ("an empty group", changed(HELLO, world_size=0), ">= 1"),
    ("a huge group", changed(HELLO, world_size=MAX_WORLD + 1), f"<= {MAX_WORLD}"),
    ("a group without a name", changed(HELLO, group=""), ">= 1"),
    ("a long name", changed(HELLO, group="g" * (MAX_NAME + 1)), f"<= {MAX_NAME}"),
    ("a name with a slash", changed(HELLO, group="prefill/0"), "regex"),
    ("a name with a line end", changed(HELLO, group="prefill-0\n"), "regex"),
    ("a name with a null byte", changed(HELLO, group="prefill\0"), "regex"),
    ("a role that is none", changed(HELLO, role="both"), "both"),
    ("an instance below 0", changed(HELLO, instance=-1), ">= 0"),
    ("a rank that is text", changed(HELLO, rank="1"), "Expected `int`, got `str`"),
    ("a long backend", changed(HELLO, backend="b" * (MAX_NAME + 1)), f"<= {MAX_NAME}"),
    ("a long transport", changed(HELLO, transport="t" * 17), "<= 16"),
    ("a huge endpoint", changed(HELLO, endpoint=bytes((1 << 20) + 1)), "<= 1048576"),
    ("an epoch below 0", changed(HELLO, epoch=-1), ">= 0"),
    ("a number past all bounds", changed(HELLO, acknowledged=2**62 + 1), "<="),
    ("a pid below 0", changed(HELLO, process=[-1, "boot", 4]), ">= 0"),
    ("a pool without pages", changed(HELLO, pool=["", 0, 0]), ">= 1"),
    ("pages that no int32 can name", changed(HELLO, pool=["", 0, 2**31]), "<= 2147483647"),
    ("a long path", changed(HELLO, pool=["/" * 256, 0, 1]), "<= 255"),
    (
        "a field too many in a layout",
        changed(HELLO, layout=[4, 16, 8, 128, "int8", "apart", [], [], "heads", 1]),
        "at most",
    ),
    ("too many stages", layout_of([1] * 65), "<= 64"),
    ("too many extras", layout_of([], [["s", 1, "int8"]] * 9), "<= 8"),
    (
        "an extra named in lines",
        changed(HELLO, layout=[4, 16, 8, 128, "int8", "apart", [], [["a\n", 1, "int8"]]]),
        "regex",
    ),
    ("a data type that is a novel", changed(HELLO, layout=[4, 16, 8, 128, "i" * 33]), "<= 32"),
    ("K and V elsewhere", changed(HELLO, layout=[4, 16, 8, 128, "int8", "far"]), "far"),
    ("a field too few", plain(HELLO)[:9], "at least length"),
    ("an epoch of submit below 0", changed(submit_of([]), epoch=-1), ">= 0"),
    ("an item number below 0", changed(submit_of([]), first=-1), ">= 0"),
    ("an acknowledgement below 0", changed(submit_of([]), acknowledged=-1), ">= 0"),
    ("too many items", changed(submit_of([]), items=[["open", 7, 3]] * (MAX_ITEMS + 1)), f"<= {MAX_ITEMS}"),
    ("an item of no kind", changed(submit_of([]), items=[["steal", 7, 3]]), "steal"),
    ("a prefix below 0", item_with(Offer, prefix_pages=-1), ">= 0"),
    ("a prefix past int32", item_with(Offer, prefix_pages=2**31), "<= 2147483647"),
    ("pages that are text", item_with(Send, pages="1, 2"), "Expected `bytes`"),
    ("last that is a number", item_with(Send, last=1), "Expected `bool`"),
    ("a huge aux", item_with(Send, aux=bytes(MAX_AUX_BYTES + 1)), f"<= {MAX_AUX_BYTES}"),
    ("a novel", item_with(Cancel, why="w" * 4097), "<= 4096"),
    ("a long farewell", changed(Bye(), why="w" * 4097), "<= 4096"),
    ("a short secret", changed(WORKER, token=b"t" * 15), ">= 16"),
    ("a long secret", changed(WORKER, token=b"t" * 65), "<= 64"),
    ("too many reports", ["reports", [["settled", 1]] * (MAX_ITEMS + 1)], f"<= {MAX_ITEMS}"),
    ("a move below 0", report_with(MoveSettled(1), move=-1), ">= 0"),
    ("moves below 0", report_with(Progress([1]), moves=[1, -1]), ">= 0"),
    ("bytes below 0", report_with(MoveDone(1, 1, 0.5), size_bytes=-1), ">= 0"),
    ("a long kind", report_with(MoveFailed(1, "", "", settled=True, started=True), kind="k" * 33), "<= 32"),
    ("a coordinator's own word", ["welcome", 1, "tcp://x", 1, [], 0, 0, 1.0], "welcome"),
    ("nothing", [], "at least length"),
]


@pytest.mark.parametrize(("fields", "told"), [row[1:] for row in TOO_MUCH], ids=[row[0] for row in TOO_MUCH])
def test_a_broken_bound_is_refused_with_a_reason(fields: Sequence[Any], told: str) -> None:
    with pytest.raises(ProtocolError, match=r"^malformed message: ") as caught:
        decode_from_peer(encode(fields))
    assert told in str(caught.value)


@pytest.mark.parametrize("room", [0, -1])
@pytest.mark.parametrize("kind", list(ITEMS), ids=lambda kind: kind.__name__)
def test_the_null_room_is_refused(kind: type[msgspec.Struct], room: int) -> None:
    """Case C35: engines use 0 for "no room"; it never becomes one."""
    with pytest.raises(ProtocolError, match=r"Expected `int` >= 1 - at `\$\[6\]\[0\]\[1\]`"):
        decode_from_peer(encode(item_with(kind, room=room)))


@pytest.mark.parametrize("kind", list(ITEMS), ids=lambda kind: kind.__name__)
def test_an_item_before_the_first_event_is_refused(kind: type[msgspec.Struct]) -> None:
    with pytest.raises(ProtocolError, match=">= 0"):
        decode_from_peer(encode(item_with(kind, after=-1)))


def test_what_just_keeps_the_bounds_is_accepted() -> None:
    largest = changed(
        HELLO,
        rank=MAX_WORLD - 1,
        world_size=MAX_WORLD,
        group="A.z_9:-" + "g" * (MAX_NAME - 7),
        instance=HIGHEST,
        epoch=HIGHEST,
        acknowledged=2**62,
        pool=["/" * 255, 2**62, 2**31 - 1],
        endpoint=bytes(1 << 20),
        transport="t" * 16,
    )
    hello = decode_from_peer(encode(largest))
    assert isinstance(hello, Hello)
    assert (hello.rank, hello.instance, hello.pool.pages) == (MAX_WORLD - 1, HIGHEST, 2**31 - 1)
    room = 2**64 - 1
    opens = [Open(room, 0)] * (MAX_ITEMS - 1)
    full = submit_of([Send(room, 2**62, b"", last=True, aux=bytes(MAX_AUX_BYTES)), *opens])
    assert len(full.items) == MAX_ITEMS
    assert decode_from_peer(encode(full)) == full


@pytest.mark.parametrize(
    "fields",
    [
        ["x" * 3_000_000],
        changed(HELLO, role="x" * 3_000_000),
        changed(HELLO, layout=[1, 1, 1, 1, "", "x" * 3_000_000]),
    ],
    ids=["tag", "role", "layout"],
)
def test_a_refusal_does_not_quote_megabytes(fields: Sequence[Any]) -> None:
    """The sentence goes into the log and back to the sender."""
    with pytest.raises(ProtocolError, match=r"malformed message: Invalid .*xxx \.\.\.$") as caught:
        decode_from_peer(encode(fields))
    assert len(str(caught.value)) < 300


# --- other versions --------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["hello", "worker"])
@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1, 2**64 - 1])
@pytest.mark.parametrize("rest", [[], ["something", {"quite": "different"}], [[[]], None, 1.5]])
def test_a_foreign_version_is_refused_naming_both(tag: str, version: int, rest: list[object]) -> None:
    """The fields of another protocol may be anything; only the tag and the version stay."""
    with pytest.raises(ProtocolError) as caught:
        decode_from_peer(encode([tag, version, *rest]))
    text = str(caught.value)
    assert text == f"protocol version {version} is not spoken here; this coordinator speaks {VERSION}"


@pytest.mark.parametrize("tag", ["hello", "worker"])
def test_our_own_version_is_not_blamed_for_other_mistakes(tag: str) -> None:
    with pytest.raises(ProtocolError, match=r"^malformed message: "):
        decode_from_peer(encode([tag, VERSION, "nonsense"]))


# --- garbage ---------------------------------------------------------------------------------


def anything_or_refusal(decode: Callable[[bytes], Any], frame: bytes) -> msgspec.Struct | None:
    """Decode a frame that may be anything: a message comes out, or a ``ProtocolError``, or the test fails."""
    try:
        message = decode(frame)
    except ProtocolError:
        return None
    assert isinstance(message, CONVERSATIONS[decode])
    return message


@st.composite
def broken_frames(draw: st.DrawFn, kinds: tuple[type[msgspec.Struct], ...]) -> bytes:
    """A valid frame of which some bytes were changed, cut out, doubled or added."""
    frame = bytearray(encode(draw(st.one_of(*(values(kind) for kind in kinds)))))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(frame)))
        end = min(len(frame), start + draw(st.integers(0, 8)))
        change = draw(st.sampled_from(["flip", "cut", "double", "insert", "end"]))
        match change:
            case "flip":
                frame[start:end] = bytes(byte ^ draw(st.integers(1, 255)) for byte in frame[start:end])
            case "cut":
                del frame[start:end]
            case "double":
                frame[start:start] = frame[start:end]
            case "insert":
                frame[start:start] = draw(st.binary(max_size=8))
            case _:
                del frame[start:]
    return bytes(frame)


#: Whatever msgpack can say, in small.
ANYTHING: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(LOWEST, HIGHEST)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=8))
    | st.datetimes(timezones=st.just(dt.UTC)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def twisted_messages(draw: st.DrawFn, kinds: tuple[type[msgspec.Struct], ...]) -> bytes:
    """A valid message in which one value, however deep, was replaced by any other one."""
    fields = plain(draw(st.one_of(*(values(kind) for kind in kinds))))
    within: list[Any] = fields
    place = draw(st.integers(0, len(within) - 1))
    while isinstance(within[place], list) and within[place] and draw(st.booleans()):
        within = within[place]
        place = draw(st.integers(0, len(within) - 1))
    within[place] = draw(ANYTHING)
    return encode(fields)


@settings(max_examples=150)
@given(st.sampled_from(list(CONVERSATIONS)), st.binary(max_size=64) | ANYTHING.map(encode))
def test_garbage_is_refused_and_nothing_worse(decode: Callable[[bytes], Any], frame: bytes) -> None:
    """Case C39: no bytes make a decoder raise anything but ``ProtocolError``."""
    anything_or_refusal(decode, frame)


@pytest.mark.parametrize("decode", list(CONVERSATIONS), ids=lambda decode: decode.__name__)
def test_broken_frames_are_refused_or_are_other_messages(decode: Callable[[bytes], Any]) -> None:
    """Case C39: the same, where nearly everything is right."""

    @settings(max_examples=80)
    @given(st.one_of(broken_frames(CONVERSATIONS[decode]), twisted_messages(CONVERSATIONS[decode])))
    def refused_or_sound(frame: bytes) -> None:
        message = anything_or_refusal(decode, frame)
        if message is not None:
            again = encode(message)
            assert encode(decode(again)) == again

    refused_or_sound()


@pytest.mark.parametrize("decode", list(CONVERSATIONS), ids=lambda decode: decode.__name__)
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x91" * 100_000 + b"\xc0",
        b"\x81\x00" * 100_000 + b"\xc0",
        encode(plain(HELLO))[:-1] + b"\x91" * 100_000,
        b"\xdc\x00\x20" + encode(plain(HELLO))[3:] + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x92\xa5hello\xd7\xff" + b"\xff" * 8,
        b"\x92\xa7reports\x91\x92\xa8progress\xdd\xff\xff\xff\xff",
        b"\x92\xa3bye\xa2\xff\xfe",
        b"\x92\xa5hello\x81\x81\x01\x02\x03",
    ],
    ids=[
        "empty",
        "deep lists",
        "deep maps",
        "deep inside of a hello",
        "deep behind a hello",
        "4 G items announced",
        "4 G pairs announced",
        "4 GiB announced",
        "a time that is none",
        "4 G moves announced",
        "text that is none",
        "a map that is a key",
    ],
)
def test_hostile_frames_are_refused(decode: Callable[[bytes], Any], frame: bytes) -> None:
    """Case C39: nesting without end, and lengths that would not fit into memory."""
    with pytest.raises(ProtocolError):
        decode(frame)
