"""Where the chunks of a prompt end in a model with recurrent layers.

SGLang cuts a prompt where the tokens of a pass are used up, and counts the places at which
recurrent layers leave states from there. Behind a cut inside a block no state would lie between
blocks any more, and nothing of the prompt could be continued. So prompts are cut between blocks.
"""

from __future__ import annotations

from math import lcm
from typing import Any

from sglang_hc.forms import BLOCK_TOKENS
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
