"""Which CUDA graphs of SGLang the tiers can live with.

Before a layer's attention reads the KV pool, Python waits for what is being restored to it. A graph
replays kernels and runs no Python. The back end `breakable` leaves attention outside its graphs, so
every layer still waits. `full` captures attention as well: it would read slots that a restoration
has yet to write. Decode graphs are always safe: a decode step never has anything to wait for, and
the tap is a copy between static buffers.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_hc.config import ConfigError
from sglang_hc.srt.binding import arguments

logger = logging.getLogger(__name__)

WHY = "attention would read restored slots before they are written"


def check_prefill_graphs(args: Any) -> None:
    """Refuse or switch off prefill graphs that run no Python at the layers.

    args: SGLang's arguments where it has chosen the graphs. Raises ConfigError when the user asked
    for such a back end; where SGLang chose it, prefill runs without graphs.
    """
    if arguments.prefill_graphs(args) != Backend.FULL:
        return
    if arguments.prefill_graphs_were_asked(args):
        raise ConfigError(
            "sglang-hc does not support --cuda-graph-backend-prefill full (or the same in "
            f"--cuda-graph-config): {WHY}. Use breakable or disabled, or add --hc-disable to "
            "serve without the tiers"
        )
    arguments.leave_out_prefill_graphs(args)
    logger.info("sglang-hc: prefill runs without CUDA graphs, not with full ones: %s", WHY)
