"""What a trace of a server holds: its format, and token ids made unreadable.

A trace (`--hc-trace`) is a file of JSON objects, one a line: a header, then events in the order of
the scheduler thread. `tiers.recording` writes it, `tools.simulator.recorded` replays it. It must
show which prompts share how many tokens, and nothing else of them.

Header: `trace` ("sglang-hc"), `version`, `host_slots`, `slot_bytes`, `layer_plan`, `page_size`,
`eviction` and `prefetch` as served.

Events, by `op`. Blocks and requests are numbered in order of appearance; a block in the host tier
is named by its slot. `t`: seconds since the start. `gone`: slots whose blocks left, in this order.
`spared`: slots kept for sooner requests.

    root       block                   a namespace
    block      block, parent, tokens   a block after another; shifted ids, big-endian int32, base64
    arrive     t, req, path            queued; `path` is the last block of its prompt
    look       t, order, needs         the eviction window, next first; needs of those that came in
    discard    req                     left the window
    admit      t, req, limit, device, hit, restored, disk
                                       of the first `limit` tokens `device` were on the device and
                                       `hit` more in the tiers; `restored` came back, `disk` of them
                                       were read for this request
    passed     t, req                  its state was still on the way; once until it is admitted
    gone       t, req                  left the queue unserved
    finish     t, req, path            is over
    stage      slot, gone, spared      a free slot was wanted (null: there was none)
    unstage    slot                    it was not needed
    publish    slot, under, block, created, gone
                                       the slot holds this block, below slot `under` (-1: a root)
    ready      slot                    its bytes are in place and can be hit
    access, pin, unpin   slots         used, root first; kept from leaving; no longer kept
    hold       block, on               pinned for its session, or released
    evict      count, gone, spared     room was wanted
    drop       slot                    a block was dropped
    clear                              all were
    lost       events                  this many events are missing
    end        t                       the server stopped in order
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

TRACE_VERSION = 1

TOKEN_LIMIT = 1 << 30
"""Token ids from here on cannot be made unreadable; no vocabulary comes near."""

_WORD = 1 << 64
_TOKEN_BITS = 30


class Pseudonyms:
    """Token ids shifted by a secret number that depends on all tokens before them.

    Two sequences agree in as many leading ids after as before, and where they part the smaller id
    stays the smaller one: a radix tree over pseudonyms has the shape of the tree over tokens. The
    secret is drawn anew for each trace and kept nowhere.
    """

    def __init__(self, block_tokens: int) -> None:
        base = secrets.randbits(64) | 1
        self._key = secrets.token_bytes(16)
        back = pow(base, -1, _WORD)
        self._powers = _powers(base, block_tokens + 1)
        self._inverse = _powers(back, block_tokens + 1)

    def start(self, namespace: str | None) -> int:
        """State before the first token of a namespace's sequences."""
        text = b"none" if namespace is None else b"some" + namespace.encode("utf-8", "replace")
        return int.from_bytes(
            hashlib.blake2b(text, digest_size=8, key=self._key).digest(), "little"
        )

    def block(self, state: int, tokens: bytes) -> tuple[bytes, int]:
        """Pseudonyms of one packed block, packed, and the state behind it.

        Raises OverflowError for an id from TOKEN_LIMIT on.
        """
        ids = np.frombuffer(tokens, dtype=">i4").astype(np.uint64)
        if int(ids.max(initial=0)) >= TOKEN_LIMIT:
            raise OverflowError(f"token ids from {TOKEN_LIMIT} on cannot be recorded")
        count = len(ids)
        sums = np.zeros(count + 1, dtype=np.uint64)
        np.cumsum((ids + np.uint64(1)) * self._inverse[1 : count + 1], out=sums[1:])
        states = (np.uint64(state) + sums) * self._powers[: count + 1]  # modulo 2**64
        shifts = _mixed(states[:count]) >> np.uint64(64 - _TOKEN_BITS)
        return (ids + shifts).astype(">i4").tobytes(), int(states[count])


def _powers(base: int, count: int) -> np.ndarray:
    return np.array([pow(base, i, _WORD) for i in range(count)], dtype=np.uint64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Every bit of the output depends on every bit of the input (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
