"""What an image is called: by what is in it, and never by an id that another one may have."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    MultimodalProcessorOutput,
)

from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.guard import SglangTree, counters
from sglang_hc.srt.requests import images
from sglang_hc.srt.requests.entrance import check_fields
from sglang_hc.srt.requests.images import (
    CONTENT_BYTES,
    KnownImages,
    digest_of,
    marks_of,
    name_by_content,
    name_images,
    packed,
)
from sglang_hc.srt.requests.namespaces import complete, keeps_state

PIXELS = torch.arange(48.0).reshape(8, 6)
PAD = 5
"""Of the vocabulary, in the place of an image that SGLang has not named yet."""


def image(start: int = 2, count: int = 6, feature: Any = PIXELS, **data: Any) -> Any:
    data = {"image_grid_thw": torch.tensor([[1, 2, 4]])} | data
    return MultimodalDataItem(
        modality=Modality.IMAGE, feature=feature, offsets=[(start, start + count - 1)],
        model_specific_data=data,
    )  # fmt: skip


OTHERS: dict[str, Callable[[], Any]] = {
    "a pixel": lambda: image(feature=PIXELS + torch.eye(8, 6) * 1e-3),
    "the same numbers in another shape": lambda: image(feature=PIXELS.reshape(6, 8)),
    "the same bytes as another type": lambda: image(feature=PIXELS.view(torch.int32)),
    "the grid": lambda: image(image_grid_thw=torch.tensor([[1, 4, 2]])),
    "a name": lambda: image(other_thw=torch.tensor([[1, 2, 4]])),
    "a value": lambda: image(scale=1.0),
    "a value of another type": lambda: image(scale=1),
    "a part of a list": lambda: image(scale=[1, [2]]),
    "the same parts in another list": lambda: image(scale=[[1], 2]),
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_differs_gives_another_digest(what: str) -> None:
    found = {digest_of(make()) for make in OTHERS.values()} | {digest_of(image())}
    assert len(found) == len(OTHERS) + 1 and None not in found
    assert {len(one or b"") for one in found} == {CONTENT_BYTES}
    assert digest_of(OTHERS[what]()) == digest_of(OTHERS[what]())


def test_where_bytes_lie_makes_no_difference() -> None:
    turned = PIXELS.t().contiguous().t()
    assert not turned.is_contiguous() and digest_of(image(feature=turned)) == digest_of(image())
    assert digest_of(image(3, 7)) == digest_of(image())


NAMELESS: dict[str, Callable[[], Any]] = {
    "a video": lambda: MultimodalDataItem(modality=Modality.VIDEO, feature=PIXELS),
    "a sound": lambda: MultimodalDataItem(modality=Modality.AUDIO, feature=PIXELS),
    "no features": lambda: image(feature=None),
    "features of a thing that has no bytes": lambda: image(feature=object()),
    "features on a device": lambda: image(feature=PIXELS.to("meta")),
    "data of a thing that has no bytes": lambda: image(scale=np.array([object()])),
    "embeddings": lambda: MultimodalDataItem(
        modality=Modality.IMAGE, feature=PIXELS, precomputed_embeddings=PIXELS
    ),
}


@pytest.mark.parametrize("what", NAMELESS)
def test_what_cannot_be_read_has_no_digest(what: str) -> None:
    """Nor one that a client made up."""
    one = NAMELESS[what]()
    one.identity, one.pad_value = b"made up" * 5, 7
    name_by_content(MultimodalProcessorOutput(mm_items=[one]))
    assert one.identity is None and one.pad_value == 7


def sent(*items: Any, length: int = 20, text: int = 1) -> Any:
    ids = [text] * length
    for item in items:
        for start, end in item.offsets:
            ids[start : end + 1] = [PAD] * (end + 1 - start)
    return MultimodalProcessorOutput(mm_items=[*items], input_ids=ids)


def test_sglang_makes_its_ids_of_the_digest() -> None:
    one = sent(image())
    one.mm_items[0].set_hash(3)
    one.padded_input_ids = one.build_padded_input_ids(one.input_ids, one.mm_items)
    before = one.padded_input_ids
    self = SimpleNamespace(server_args=SimpleNamespace(_hc_config={}))

    async def tokenized(self: Any, obj: Any) -> Any:
        return SimpleNamespace(mm_inputs=one)

    asyncio.run(name_images(tokenized, self, None))
    (item,) = one.mm_items
    assert item.identity == digest_of(item)
    assert one.padded_input_ids != before
    assert one.padded_input_ids[2:8] == item.padding_sequence(6)


def test_a_server_without_the_tiers_leaves_images_alone() -> None:
    one = sent(image())

    async def tokenized(self: Any, obj: Any) -> Any:
        return SimpleNamespace(mm_inputs=one)

    asyncio.run(name_images(tokenized, SimpleNamespace(server_args=SimpleNamespace()), None))
    assert one.mm_items[0].identity is None


# -- in the scheduler ----------------------------------------------------------------------------


def taken_in(one: Any, known: KnownImages | None = None, **other: Any) -> Any:
    """A request as the scheduler has it when it knows whose it is."""
    name_by_content(one)
    ids = array("q", one.build_padded_input_ids(one.input_ids, one.mm_items) or one.input_ids)
    req = SimpleNamespace(
        origin_input_ids=ids, output_ids=array("q"), extra_key="k1:a", cache_salt=None,
        lora_id=None, multimodal_inputs=MultimodalInputs.from_processor_output(one), **other,
    )  # fmt: skip
    tree = object.__new__(SglangTree)
    tree.images = KnownImages() if known is None else known
    complete(SimpleNamespace(tree_cache=tree), req)
    return req


def path_of(req: Any) -> bytes:
    return packed(req, fields.first_ids(req, len(req.origin_input_ids)))


def test_the_path_of_a_request_names_its_images() -> None:
    req, same = taken_in(sent(image())), taken_in(sent(image()))
    assert keeps_state(req) and path_of(req) == path_of(same)
    assert path_of(req) != path_of(taken_in(sent(image(feature=PIXELS + 1))))
    assert path_of(req) != path_of(taken_in(sent(image(image_grid_thw=torch.tensor([[1, 4, 2]])))))
    req.multimodal_inputs = None  # SGLang does so when the request is over
    req.output_ids.extend([3, 4])
    assert keeps_state(req) and path_of(req) == path_of(same)


def test_positions_are_a_part_of_what_an_image_is() -> None:
    def placed(positions: torch.Tensor) -> Any:
        one = sent(image())
        one.mrope_positions = positions
        return taken_in(one)

    plain = torch.arange(20).expand(3, 20)
    inside, behind, before = plain.clone(), plain.clone(), plain.clone()
    inside[1, 4], behind[:, 8:], before[:, :2] = 2, behind[:, 8:] - 3, 7
    assert len({path_of(placed(one)) for one in (plain, inside, behind)}) == 3
    assert not keeps_state(placed(before)), "text before an image has the positions of text"


UNKEPT: dict[str, Callable[[], Any]] = {
    "a video beside it": lambda: taken_in(
        sent(image(), MultimodalDataItem(modality=Modality.VIDEO, feature=PIXELS, offsets=[(9, 9)]))
    ),
    "tokens in two places": lambda: taken_in(
        sent(MultimodalDataItem(modality=Modality.IMAGE, feature=PIXELS, offsets=[(2, 3), (9, 10)]))
    ),
    "embeddings beside it": lambda: taken_in(sent(image()), input_embeds=[[1.0]]),
    "types of tokens": lambda: taken_in(sent(image()), token_type_ids=[1]),
    "text that is in no vocabulary": lambda: taken_in(sent(image(), text=1 << 40)),
    "ids that are not the image's": lambda: taken_in(sent(image(), image(feature=PIXELS + 1))),
    "nothing of it": lambda: taken_in(sent()),
}  # fmt: skip


@pytest.mark.parametrize("what", UNKEPT)
def test_what_is_more_than_images_is_not_kept(what: str) -> None:
    before = counters["unkept_requests"]
    req = UNKEPT[what]()
    assert not keeps_state(req) and marks_of(req) is None
    assert counters["unkept_requests"] == before + 1
    assert fields.namespace_of(req) == "k1:a"


@pytest.mark.parametrize("what", ["id", "hash"])
def test_images_that_sglang_takes_for_one_share_nothing(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Planted: an id, or a hash, that does not depend on the image."""
    if what == "id":
        monkeypatch.setattr(schedule_batch, "_compute_pad_values", lambda identity: (1 << 61,) * 4)
    else:
        set_identity = MultimodalDataItem.set_identity

        def same_hash(self: Any, identity: bytes) -> None:
            set_identity(self, identity)
            self.hash = 3

        monkeypatch.setattr(MultimodalDataItem, "set_identity", same_hash)
    known = KnownImages()
    first = taken_in(sent(image()), known)
    other = taken_in(sent(image(feature=PIXELS + 1)), known)
    third = taken_in(sent(image(feature=PIXELS + 1)), known)
    again = taken_in(sent(image()), known)
    assert keeps_state(first) and keeps_state(again) and path_of(first) == path_of(again)
    assert not keeps_state(other) and not keeps_state(third)
    names = [fields.namespace_of(req) for req in (first, again, other, third)]
    assert names[0] == names[1] == "k1:a" and len(set(names)) == 3


def test_an_image_that_sglang_takes_for_a_video_shares_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule_batch, "_compute_pad_values", lambda identity: (1 << 61,) * 4)
    known = KnownImages()
    video = MultimodalDataItem(modality=Modality.VIDEO, feature=PIXELS, offsets=[(2, 7)])
    assert not keeps_state(taken_in(sent(video), known))
    req = taken_in(sent(image()), known)
    assert not keeps_state(req) and fields.namespace_of(req) != "k1:a"


def test_images_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "KNOWN", 3)
    known = KnownImages()
    for value in range(10):
        assert keeps_state(taken_in(sent(image(feature=PIXELS + value)), known))
        assert keeps_state(taken_in(sent(image()), known))
    assert len(known._contents) == 6
    assert digest_of(image()) in known._contents.values()


@pytest.mark.parametrize("key", ["hash", "pad_value", "identity", "mrope_positions"])
def test_clients_name_no_images(key: str) -> None:
    processed = {"format": "processor_output", "pixel_values": [[1.0]], key: 1}
    for given in (processed, [processed], [["x", processed]]):
        for field in ("image_data", "video_data", "audio_data"):
            with pytest.raises(ValueError, match=f"{field}: {key} is not taken from requests"):
                check_fields(GenerateReqInput(text="a", **{field: given}))
    del processed[key]
    check_fields(GenerateReqInput(text="a", image_data=[processed, "x"]))
