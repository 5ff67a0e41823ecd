"""Which CUDA graphs of SGLang the tiers can live with.

Before a layer's attention reads the KV pool, Python waits for what is being restored to it. A graph
replays kernels and runs no Python. The back end `breakable` leaves attention outside its graphs, so
every layer still waits. `full` captures attention as well: it would read slots that a restoration
has yet to write. `tc_piecewise` compiles the model around attention, and with it the tap, which
was never shown to be right there. Decode graphs are always safe: a decode step never has anything
to wait for, and the tap is a copy between static buffers.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_hc.config import ConfigError
from sglang_hc.srt.binding import arguments

logger = logging.getLogger(__name__)

REFUSED = {
    Backend.FULL: "attention would read restored slots before they are written",
    Backend.TC_PIECEWISE: "a compiled model may skip the taps that capture hidden states",
}
"""Back ends of prefill graphs that are not served, and why."""


def check_prefill_graphs(args: Any, wished: str | None) -> None:
    """Refuse or switch off prefill graphs that run no Python at the layers.

    args: SGLang's arguments after it has resolved them. wished: `cuda_graph_backend_prefill` as it
    was before. Raises ConfigError when the user asked for such a back end; where SGLang chose it,
    prefill runs without graphs.
    """
    backend = arguments.prefill_graphs(args)
    why = REFUSED.get(backend)
    if why is None:
        return
    if arguments.prefill_graphs_were_asked(args, wished):
        raise ConfigError(
            f"sglang-hc does not support --cuda-graph-backend-prefill {backend} (or the same in "
            f"--cuda-graph-config): {why}. Use breakable or disabled, or add --hc-disable to "
            "serve without the tiers"
        )
    arguments.leave_out_prefill_graphs(args)
    logger.info("sglang-hc: prefill runs without CUDA graphs, not with %s: %s", backend, why)
