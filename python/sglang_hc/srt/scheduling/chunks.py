"""Where the chunks of a prompt end in a model with recurrent layers.

SGLang cuts a prompt where the tokens of a pass are used up, and counts the places at which
recurrent layers leave states from there. Behind a cut inside a block no state would lie between
blocks any more, and nothing of the prompt could be continued. So prompts are cut between blocks.

SGLang reserves no slots for the tokens behind a cut, and computes a chunk whether there are slots
for it or not: whom it admits first takes all tokens of a pass, and nobody replies between two
chunks. Here a cut leaves tokens of the pass, and a prompt that meets its history waits.
"""

from __future__ import annotations

from math import lcm
from typing import Any

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.srt.binding import fields
from sglang_hc.srt.tree.tree_backend import HcRadixCache


def cut_between_blocks(tree: HcRadixCache, adder: Any, align: int | None) -> int | None:
    """What the end of a cut is a multiple of in this pass: `align` is SGLang's, None for nothing.
    adder: SGLang's PrefillAdder."""
    left = adder.rem_chunk_tokens
    if tree.states is None or left is None:
        return align
    if left < BLOCK_TOKENS and not adder.can_run_list:
        return align  # a pass has less than a block: the prompt would wait for ever
    adder.mamba_chunk_grid = BLOCK_TOKENS  # of chunks behind the first one
    return lcm(align or 1, BLOCK_TOKENS)


def cut_where_it_branches(tree: HcRadixCache, adder: Any, req: Any) -> None:
    """A pass leaves one state of a prompt. One that is to leave a state where it leaves a path that
    is known is cut there, so that it leaves one at its end as well; unless others wait, whom a cut
    prompt keeps out of the pass. adder: SGLang's PrefillAdder; req: about to be admitted, with what
    it is promised."""
    if tree.states is None or adder.rem_chunk_tokens is None:
        return
    if adder.waiting_queue_len - len(adder.can_run_list) > 1:
        return
    branch, end = fields.branch_of(req), len(fields.prompt_of(req))
    step = lcm(BLOCK_TOKENS, tree.page_size)
    first = (branch or 0) - fields.prefix_length(req) - fields.host_hit(req)
    if branch and first >= step and branch + step <= end:
        adder.rem_chunk_tokens = min(adder.rem_chunk_tokens, first)


def admit_nobody_behind(tree: HcRadixCache, adder: Any, cut: Any) -> None:
    """With recurrent layers: nobody takes what a prompt cut in this pass leaves of it, since the
    slots that others get are those of its next chunks. cut: the request; None if none was cut."""
    if tree.states is not None and cut is not None and adder.chunked_req_limit is None:
        adder.rem_chunk_tokens = 0


def has_slots(adder: Any, req: Any, *, meets: bool) -> bool:
    """False: the next chunk of the request waits until one of those that reply has ended. meets:
    the request meets its history, which may take slots for all of the rest at once."""
    if not adder.running_batch.reqs:
        return True
    rest = len(fields.prompt_of(req)) - fields.prefix_length(req)
    budget = adder.memory_budget
    if not meets and budget.remaining_total > 0:
        return True  # SGLang makes the chunk that small
    chunk = rest if meets else min(rest, adder.rem_chunk_tokens)
    return bool(adder.ceil_paged_tokens(chunk) <= budget.remaining_current)
