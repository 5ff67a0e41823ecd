"""Images of requests: digests of what is in them, and paths that name them by these.

    tokenizer   hashes features on a thread, beside what else it does; SGLang makes its ids of it
    scheduler   a path has ids of its own in the place of an image (`tree.images`)

Two images that SGLang takes for one, by an id of 62 bits or a hash of 64, are told apart here: the
later one's request shares nothing, also not on the device, and nothing of it is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import struct
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np
import torch

from sglang_hc.forms import LayerPlan
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments, fields
from sglang_hc.srt.binding import images as binding
from sglang_hc.srt.engine.guard import counters
from sglang_hc.tree.identity import pack_tokens
from sglang_hc.tree.images import Image, Marks

logger = logging.getLogger(__name__)

WITH_IMAGES = frozenset(
    {
        "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "InternVLChatModel",
        "KimiK25ForConditionalGeneration", "Mistral3ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    }
)  # fmt: skip
"""Model classes that were checked to compute nothing else from an image than the tokens that stand
for it, and those as any others: from what is before them. Others may attend in both directions
(Gemma 3), or turn on weights for all of a request."""

CONTENT_BYTES = 32
"""Of an image's digest."""

KNOWN = 1 << 16
"""Images that are told from later ones. SGLang's device pool and cache of embeddings have fewer."""

_MARKS = "_hc_marks"
"""Attribute of a request whose images stand in its path: its `Marks`."""


# -- in the tokenizer's process ------------------------------------------------------------------


async def name_images(
    original: Callable[..., Awaitable[Any]], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND TokenizerManager._tokenize_one_request: images are known by a full digest of what is
    in them, whatever a client calls them."""
    made = await original(self, *args, **kwargs)
    sent = binding.sent_along(made)
    if sent is not None and config_of(arguments.of(self)) is not None:
        await asyncio.to_thread(name_by_content, sent)
    return made


def name_by_content(sent: Any) -> None:
    """Hash the images of a request and name them. Takes a millisecond for each megabyte of
    features, mostly without the interpreter's lock. sent: see `binding.images`."""
    binding.name(sent, [digest_of(item) for item in binding.sent_images(sent)])


def digest_of(item: Any) -> bytes | None:
    """CONTENT_BYTES over all of an image's features and what the processor says of them, with
    types, shapes and names. None where they cannot be read here: no image, features that a model
    has made embeddings of, or that lie on a GPU."""
    content = binding.content_of(item)
    if content is None:
        return None
    state = hashlib.blake2b(digest_size=CONTENT_BYTES, person=b"hc content")
    try:
        _take_in(state.update, content)
    except Exception as error:  # a client may choose some of it
        logger.debug("sglang-hc: an image is not known by its content: %s", error)
        return None
    return state.digest()


def _take_in(update: Callable[[Any], None], value: object) -> None:
    """Hash a value such that no other one gives the same bytes. Raises TypeError for what has no
    bytes in host memory."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_sparse:
        _head(update, "tensor", str(value.dtype), *value.shape)
        update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        _head(update, "array", value.dtype.str, *value.shape)
        update(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, dict):
        _head(update, "dict", len(value))
        for name in sorted(value):
            _take_in(update, name)
            _take_in(update, value[name])
    elif isinstance(value, list | tuple):
        _head(update, "list", len(value))
        for one in value:
            _take_in(update, one)
    elif isinstance(value, str | bytes):
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        _head(update, type(value).__name__, len(raw))
        update(raw)
    elif value is None or isinstance(value, bool | int | float | np.generic):
        _head(update, type(value).__name__, repr(value))
    else:
        raise TypeError(f"{type(value).__name__} has no bytes")


def _head(update: Callable[[Any], None], *parts: object) -> None:
    raw = repr(parts).encode()
    update(struct.pack(">I", len(raw)) + raw)


# -- in the scheduler's process ------------------------------------------------------------------


def known_images(runner: Any, plan: LayerPlan, whole: bool) -> KnownImages | None:
    """For a server that keeps requests with images; None for others. whole: all layers have full
    attention."""
    keeps = type(runner.model).__name__ in WITH_IMAGES and runner.spec_algorithm.is_none()
    return KnownImages() if keeps and whole and plan.kv == plan.num_layers else None


class KnownImages:
    """What SGLang's names of images and others stood for lately. Belongs to the scheduler
    thread."""

    def __init__(self) -> None:
        self._contents: OrderedDict[tuple[int, int | None], bytes] = OrderedDict()

    def are_told_apart(self, shown: Iterable[binding.Named]) -> bool:
        """Note these. False where SGLang takes one of them for another."""
        apart = True
        for one in shown:
            for name in enumerate(one.names):
                apart = self._contents.setdefault(name, one.content) == one.content and apart
                self._contents.move_to_end(name)
        while len(self._contents) > 2 * KNOWN:
            self._contents.popitem(last=False)
        return apart


def look_at(known: KnownImages | None, req: Any) -> bool:
    """Note the images of a request that was just taken in. Returns whether its state may be kept
    below the device: it depends on tokens, namespace and images alone. known: None where images
    are not kept."""
    if not fields.has_other_inputs(req):
        return True
    kept = known is not None and _mark(known, req)
    if not kept:
        counters["unkept_requests"] += 1
    return kept


def _mark(known: KnownImages, req: Any) -> bool:
    if not known.are_told_apart(binding.named(req)):
        logger.warning("sglang-hc: SGLang takes two images for one; the later one shares nothing")
        fields.set_namespace(req, secrets.token_hex(16))
        return False
    shown = binding.images_of(req)
    if shown is None:
        return False
    images = [Image(image.start, image.stop, image.content + image.positions) for image in shown]
    try:
        marks = Marks(fields.first_ids(req, fields.prompt_tokens(req)), images)
    except ValueError:
        return False
    setattr(req, _MARKS, marks)
    return True


def marks_of(req: Any) -> Marks | None:
    """What a request's path has in the place of its images; None without images."""
    return getattr(req, _MARKS, None)


def path_ids(req: Any, tokens: array[int]) -> array[int]:
    """The ids of a request's path, given its first tokens as SGLang has them."""
    marks = marks_of(req)
    return tokens if marks is None else marks.ids(tokens)


def packed(req: Any, tokens: array[int]) -> bytes:
    """As `path_ids`, packed."""
    return pack_tokens(path_ids(req, tokens))
