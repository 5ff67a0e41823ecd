"""What pages are called in KV events: SGLang's own hashes, over the namespace that a client sent.

On the device and below, the packed namespace takes the place of salt, key and adapter. In events
they are what they are in SGLang: the salt is in the hash and beside it, the adapter's name beside
it, and the client's key in the hash with `"format": "dynamo"` alone. The hash of an adapter's pages
begins with the digest of its weights. The model's are in none: state of other weights than those of
now is not told. What lies behind a cut no client asks for as it is: its salt
is the whole namespace.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from sglang.srt.disaggregation.kv_events import kv_event_namespace_seed, namespaced_block_hash
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import (
    compute_node_event_hash_values,
    get_hash_str,
    hash_str_to_int64,
)

from sglang_hc.srt.binding import fields
from sglang_hc.tiers.ledger import Page, Paged, Tokens
from sglang_hc.tree.identity import TOKEN_BYTES, unpack_tokens
from sglang_hc.tree.namespaces import Namespace


class Published(NamedTuple):
    """A namespace in events. seed: what hashes are hashed with again; None for nothing."""

    salt: str | None
    adapter: str | None
    seed: bytes | None


class EventNames:
    """Makes pages of blocks (`ledger.Paging`) and of nodes. Holds nothing; any thread."""

    def __init__(self, params: Any) -> None:
        """params: of SGLang's tree."""
        self.page_size: int = params.page_size
        self._dynamo = bool(params.dynamo_kv_event_format)
        self._adapters = params.kv_event_lora_names

    def published(self, namespace: str | None) -> Published:
        """An adapter whose name is not known is called by its digest."""
        parts = Namespace.of(namespace)
        client = parts._replace(adapter=None, weights=None)
        salt = parts.salt if parts.cut is None else client.pack()
        key, digest = parts.key if parts.key is not None else parts.hashed, parts.adapter
        adapter = None
        if digest is not None:
            known = self._adapters.get(namespace) if self._adapters is not None else None
            adapter, key = known or digest, (key or "") + digest
        seed = None
        if self._dynamo:
            seed = kv_event_namespace_seed(extra_key=key, cache_salt=salt)
        elif digest is not None:
            seed = kv_event_namespace_seed(extra_key=key, cache_salt=None)
        return Published(salt, adapter, seed)

    def chain(self, key: RadixKey, before: str | None) -> list[str]:
        """Hashes of the whole pages of a key, behind the page whose hash is `before`."""
        salt = self.published(fields.namespace_of(key)).salt
        own = RadixKey(key.token_ids, None, key.is_bigram, key.limit, salt)
        if before is None and salt is not None:
            first = SimpleNamespace(key=own, parent=None, event_hash_value=None)
            return list(compute_node_event_hash_values(first, self.page_size))
        return list(get_hash_str(own, before, page_size=self.page_size))

    def pages_of(
        self, namespace: str | None, before: str | None, chain: Sequence[str], tokens: Tokens
    ) -> tuple[Page, ...]:
        """Pages with these hashes. before: hash of the one before them; None for none."""
        salt, adapter, seed = self.published(namespace)
        parent, pages = None if before is None else self.number(before, seed), list[Page]()
        size = self.page_size * (TOKEN_BYTES if isinstance(tokens, bytes) else 1)
        for index, digest in enumerate(chain):
            own = tokens[index * size : (index + 1) * size]
            pages.append(Page(self.number(digest, seed), parent, own, salt, adapter))
            parent = pages[-1].hash
        return tuple(pages)

    def pages(self, namespace: str | None, above: Paged | None, tokens: bytes) -> Paged:
        """As in `ledger.Paging`."""
        before = above.chain.hex() if above is not None and above.chain else None
        whole = len(tokens) // TOKEN_BYTES // self.page_size * self.page_size
        if not whole:
            return Paged((), bytes.fromhex(before or ""))
        ids = array("q", unpack_tokens(tokens)[:whole].tolist())
        chain = self.chain(RadixKey(ids, namespace), before)
        pages = self.pages_of(namespace, before, chain, tokens)
        return Paged(pages, bytes.fromhex(chain[-1]))

    def number(self, digest: str, seed: bytes | None) -> int:
        """How events call a page with this hash."""
        return int(namespaced_block_hash(hash_str_to_int64(digest), namespace_seed=seed))
