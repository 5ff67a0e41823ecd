"""Ends: what a path needs to be continued is all there, or the path is not continued there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sglang_hc.forms import BLOCK_TOKENS, EndLayout, StateLayers, WindowLayers
from sglang_hc.policy.ends import Stay
from sglang_hc.policy.eviction import EvictionPolicy, make_policy
from sglang_hc.policy.pins import SessionPins
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.ends import End, EndPart, Ends
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import Prefix
from support.host import host_tier, keep, path_of, tokens_of

WINDOW = EndLayout(window=WindowLayers((1, 3), 2 * BLOCK_TOKENS, (8, 8)))
STATE = EndLayout(state=StateLayers((0, 1, 2), (24, 40), ("float32", "float32")))


class World:
    """A host tier whose paths have ends."""

    def __init__(self, layout: EndLayout, slots: int = 64, end_slots: int = 16) -> None:
        self.window = LookAhead()
        self.host: HostTier = host_tier(slots)
        self.ready: list[EndPart] = []
        self.pins = SessionPins(64, 60.0)
        policy: EvictionPolicy[End] = make_policy("queue", self.window, self.pins)
        next_use = self.window.next_use
        self.ends = Ends(layout, end_slots, self.host, policy, next_use)
        self.ends.on_ready = self.ready.append

    def keep(self, word: str) -> list[BlockNode]:
        """The path of a word, each letter of which is a block."""
        keep(self.host, tokens_of(word))
        return self.path(word)

    def path(self, word: str) -> list[BlockNode]:
        return list(self.host.tree.match(Prefix(None, tokens_of(word))).nodes)

    def end(self, word: str, stay: Stay = Stay.REPLY) -> list[EndPart]:
        """A path with an end, all parts of which are written."""
        parts = self.ends.begin(self.keep(word), stay=stay)
        assert parts is not None
        for part in parts:
            self.ends.written(part)
        self.check()
        return parts

    def deepest(self, word: str) -> int:
        return self.ends.deepest(self.path(word))

    def needed(self, *words: str) -> None:
        """These wait, in this order."""
        for number in range(1, len(words) + 1):
            self.window.requests.arrived(number)
        order = range(1, len(words) + 1)
        needs = {number: path_of(word).block_ids for number, word in zip(order, words, strict=True)}
        self.window.update(tuple(order), len(words), needs.__getitem__)

    def check(self) -> None:
        self.host.check_integrity()
        self.ends.check_integrity()


def blocks_of(parts: Sequence[EndPart]) -> list[str]:
    return [chr(part.node.tokens[3]) for part in parts]


def test_a_path_is_continued_at_its_last_end_and_nowhere_else() -> None:
    world = World(WINDOW)
    assert blocks_of(world.end("abcd")) == ["c", "d"]
    assert world.deepest("abcdef") == 4 and world.deepest("abc") == 0
    assert blocks_of(world.end("abcdefg")) == ["f", "g"]
    assert world.deepest("abcdefgh") == 7 and world.deepest("abcdef") == 4
    parts = world.ends.parts(world.path("abcdefg"), 7)
    assert blocks_of(parts) == ["f", "g"] and world.ready[-2:] == parts
    assert world.deepest("xyz") == 0


def test_ends_close_to_each_other_share_parts() -> None:
    world = World(WINDOW)
    world.end("abcd")
    assert blocks_of(world.end("abcde")) == ["e"]
    assert world.end("abcde") == [] and len(world.ends) == 2
    assert world.ends.free_slots == 16 - 3


def test_a_short_path_needs_no_more_blocks_than_it_has() -> None:
    world = World(WINDOW)
    assert blocks_of(world.end("a")) == ["a"]
    assert world.deepest("ab") == 1


def test_an_end_that_lacks_a_block_of_its_window_is_none() -> None:
    """Planted: the part of an earlier block of the window is not there."""
    world = World(WINDOW)
    first, last = world.ends.begin(world.keep("abcd")) or ()
    world.ends.written(last)
    assert world.deepest("abcd") == 0, "only the last block has its part"
    world.ends.written(first)
    assert world.deepest("abcd") == 4
    first.ready = False
    assert world.deepest("abcd") == 0
    first.ready, last.ready = True, False
    assert world.deepest("abcd") == 0


def test_an_end_without_its_state_is_none() -> None:
    """Planted: the state at the end is that of the block before."""
    world = World(STATE)
    path = world.keep("abcd")
    assert blocks_of(world.end("abc")) == ["c"]
    assert world.ends.deepest(path) == 3
    (part,) = world.ends.begin(path) or ()
    assert world.ends.deepest(path) == 3, "the bytes are not there yet"
    world.ends.failed(part)
    assert world.ends.deepest(path) == 3 and len(world.ends) == 1
    world.check()


def test_a_part_that_fails_takes_all_ends_with_it_that_need_it() -> None:
    world = World(WINDOW)
    one, two = world.ends.begin(world.keep("abcd")) or ()
    (three,) = world.ends.begin(world.keep("abcde")) or ()
    world.ends.failed(two)
    assert len(world.ends) == 0
    world.ends.written(one)
    world.ends.written(three)
    assert world.deepest("abcde") == 0 and world.ends.free_slots == 16
    world.check()


def test_an_end_leaves_with_its_block_and_its_slot_when_nobody_reads_it() -> None:
    world = World(WINDOW)
    parts = world.end("abcd")
    world.ends.pin(parts)
    world.host.drop(world.path("abcd")[-1])
    world.check()
    assert len(world.ends) == 0 and world.ends.free_slots == 14
    assert world.deepest("abcd") == 0
    world.ends.unpin(parts)
    assert world.ends.free_slots == 16 and parts[0].slot == -1
    world.check()
    with pytest.raises(RuntimeError):
        world.ends.unpin(parts)


def test_an_end_of_the_same_path_makes_room_first() -> None:
    world = World(STATE, end_slots=3)
    for word in ("x", "ab", "abcd"):
        world.end(word)
    world.end("y")
    assert world.deepest("x") == 1, "the oldest, but the only end of its path"
    assert world.deepest("abcde") == 4 and world.deepest("abc") == 0 and world.ends.evicted == 1
    world.end("yz")  # the next turn takes the place of its own last one
    assert world.deepest("x") == 1 and world.deepest("abcd") == 4 and world.deepest("yz") == 2


def test_an_end_that_paths_share_stays_while_it_is_used() -> None:
    world = World(STATE, end_slots=3)
    world.end("ab", Stay.SHARED)
    for word in ("abcd", "abxy"):
        world.end(word)
    world.ends.used(world.path("ab")[-1])
    world.end("z")
    assert world.deepest("abcd") == 2 and world.deepest("abxy") == 4


def test_a_reply_that_its_conversation_has_left_makes_room_first() -> None:
    """The next turn repeats the reply in other words, so it goes on behind the prompt."""
    world = World(STATE, end_slots=4)
    world.end("x")
    world.end("ab", Stay.PROMPT)
    world.end("abcd")
    world.end("abyy", Stay.PROMPT)
    world.end("abyyz")
    assert world.deepest("abx") == 0 and world.deepest("abcd") == 4
    world.end("abyyzwv", Stay.PROMPT)  # the result of a tool: the conversation goes on
    assert world.deepest("abcd") == 0 and world.deepest("abyyz") == 5
    world.end("abyyzwvu")
    assert world.deepest("abyyz") == 4, "the reply goes, and the prompt of the turn stays"
    world.end("abyyt", Stay.PROMPT)
    world.end("abyyts")
    assert world.deepest("abyyt") == 5 and world.deepest("abyyts") == 6 and world.deepest("x") == 1


def test_an_end_where_several_conversations_go_on_is_shared() -> None:
    """The first one's prompt ended there, before what the others say otherwise."""
    world = World(STATE, end_slots=6)
    world.end("ab", Stay.PROMPT)
    for word in ("abc", "abd", "abe", "abf", "abg", "abh", "abi"):
        world.ends.used(world.path("ab")[-1])
        world.end(word, Stay.PROMPT)
    assert world.deepest("abz") == 2 and world.deepest("abd") == 2 and world.deepest("abe") == 3
    assert len(world.ends) == 6, "two of the others have left, the oldest first"


def test_pins_of_many_short_paths_leave_half_of_the_slots_to_others() -> None:
    """Their blocks are far from the bound. Who pinned first keeps what it has."""
    world = World(STATE, end_slots=8)
    for number, word in enumerate("abcdefgh"):
        world.end(word)
        world.pins.pin(None, str(number), path_of(word).block_ids, 9.0, 0.0)
    world.needed("h")
    for word in "stuvwxyz":
        world.end(word)
        assert world.deepest(word) == 1
    assert [word for word in "abcdefgh" if world.deepest(word)] == [*"abcdh"]


def test_a_reply_of_a_pinned_session_stays_when_another_request_leaves_it() -> None:
    """It asks for another answer while a tool of the session runs."""
    for pinned in (False, True):
        world = World(STATE, end_slots=3)
        world.end("ab", Stay.PROMPT)
        world.end("abcd")
        if pinned:
            world.pins.pin(None, "session", path_of("abcd").block_ids, 9.0, 0.0)
        world.end("abxy", Stay.PROMPT)
        world.end("m")
        world.end("n")
        assert world.deepest("abcd") == (4 if pinned else 0)


def test_first_prompts_stay_where_other_conversations_have_left_their_replies() -> None:
    for leaves in (False, True):
        world = World(STATE, end_slots=3)
        world.end("ab", Stay.PROMPT)
        world.end("abcd")
        world.end("abyy" if leaves else "abcde", Stay.PROMPT)
        world.end("m", Stay.PROMPT)
        world.end("mn")
        world.end("o")
        assert world.deepest("mx") == (1 if leaves else 0)


def test_an_end_that_is_used_again_is_not_outlived() -> None:
    world = World(STATE, end_slots=3)
    for word in ("x", "ab", "abcd"):
        world.end(word)
    world.ends.used(world.path("ab")[-1])
    world.end("y")
    assert world.deepest("x") == 0 and world.deepest("abc") == 2


def test_an_end_is_needed_again_when_what_came_later_has_left() -> None:
    world = World(STATE, end_slots=3)
    for word in ("x", "ab", "abcd"):
        world.end(word)
    world.host.drop(world.path("abcd")[-1])
    world.end("y")
    world.end("z")
    assert world.deepest("x") == 0 and world.deepest("ab") == 2


def test_what_waiting_requests_need_leaves_last() -> None:
    world = World(STATE, end_slots=2)
    world.end("ab")
    world.end("xy")
    world.needed("abc")
    world.end("z")
    assert world.deepest("ab") == 2 and world.deepest("xy") == 0
    assert world.ends.stage(lambda end: world.window.next_use(end.block_id) is not None) is not None
    assert world.ends.stage(lambda end: True) is None
    assert world.deepest("ab") == 2
    assert world.ends.stage() is not None and world.deepest("ab") == 0


def test_an_older_end_stays_for_a_request_that_cannot_use_the_later_one() -> None:
    """It waits with another ending, so no branch is in the tree yet."""
    world = World(STATE, end_slots=2)
    world.end("ab")
    world.end("abcd")
    world.needed("abx")
    world.end("z")
    assert world.deepest("ab") == 2 and world.deepest("abcd") == 2
    world = World(STATE, end_slots=2)
    world.end("ab")
    world.end("abcd")
    world.needed("abcdx", "abx")
    world.end("z")
    assert world.deepest("abc") == 0 and world.deepest("abcd") == 4


def test_nothing_changes_where_there_is_no_room() -> None:
    world = World(WINDOW, end_slots=3)
    parts = world.end("abc")
    world.ends.pin(parts)
    assert world.ends.begin(world.keep("xyz")) is None
    world.check()
    assert world.deepest("abc") == 3 and world.deepest("xyz") == 0 and world.ends.free_slots == 1
    world.ends.unpin(parts)
    world.end("xyz")
    assert world.deepest("xyz") == 3


def test_slots_that_the_caller_staged_are_taken_or_stay_his() -> None:
    world = World(WINDOW)
    world.end("abc")
    slots = [world.ends.stage(), world.ends.stage()]
    assert None not in slots
    path = world.keep("abcd")
    (part,) = world.ends.begin(path, {2: slots[0], 3: slots[1]}) or ()
    assert part.slot == slots[1] and world.ends.staged_slots == 1
    world.ends.unstage(slots[0])
    world.ends.written(part)
    world.check()


def test_an_end_needs_room() -> None:
    with pytest.raises(ValueError, match="2 slots"):
        World(WINDOW, end_slots=1)
