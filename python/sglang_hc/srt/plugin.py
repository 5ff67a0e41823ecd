"""Entry point of the `sglang.srt.plugins` group: puts every hook in place.

SGLang loads plugins in the launcher and in every scheduler process, and only logs what a plugin
raises: `in_place.py` looks whether all is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.registry import (
    register_radix_cache_backend,
    registered_radix_cache_backends,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_active = False


def activate() -> None:
    """Register everything. Called by SGLang's plugin loader; harmless when called again."""
    global _active  # noqa: PLW0603  one flag per process, as SGLang's own registry has
    if _active:
        return
    from sglang_hc.srt.engine import cpu, in_place
    from sglang_hc.srt.engine.guard import guarded

    if not torch.cuda.is_available():
        cpu.enable()
    for target, kind, hook in all_hooks():
        HookRegistry.register(target, guarded(hook, kind), kind)
        in_place.expect(target)
    if in_place.BACKEND not in registered_radix_cache_backends():
        from sglang_hc.srt.start.build import build_tree_cache

        register_radix_cache_backend(in_place.BACKEND, build_tree_cache)
    _active = True


def all_hooks() -> list[tuple[str, HookType, Callable[..., Any]]]:
    """Every hook: SGLang's function, how it is wrapped, and ours."""
    from sglang_hc.srt.arguments import server_args
    from sglang_hc.srt.model import cpu_attention, model_state
    from sglang_hc.srt.requests import entrance, namespaces, overflow, pins
    from sglang_hc.srt.scheduling import hooks, meeting, preemption, speculation
    from sglang_hc.srt.start import worker

    after, around, before = HookType.AFTER, HookType.AROUND, HookType.BEFORE
    args = "server_args.ServerArgs"
    model_runner = "model_executor.model_runner.ModelRunner"
    scheduler = "managers.scheduler.Scheduler"
    policy = "managers.schedule_policy"
    tokenizer = "managers.tokenizer_manager.TokenizerManager"
    serving = "entrypoints.openai.serving_base.OpenAIServingBase"
    chat = "entrypoints.openai.serving_chat.OpenAIServingChat"
    parts = "managers.scheduler_components"
    updates = f"{parts}.weight_updater.SchedulerWeightUpdaterManager"
    results = f"{parts}.batch_result_processor.SchedulerBatchResultProcessor"
    backend = "layers.attention.torch_native_backend.TorchNativeAttnBackend"
    found = [
        (f"{args}.add_cli_args", after, server_args.add_cli_args),
        (f"{args}.from_cli_args", around, server_args.from_cli_args),
        (f"{args}.__post_init__", around, server_args.post_init),
        (f"{model_runner}.load_model", after, model_state.after_load_model),
        (f"{model_runner}.forward", around, hooks.forward),
        (f"{policy}.SchedulePolicy.calc_priority", after, hooks.arrange),
        (f"{policy}.PrefillAdder.add_one_req", around, meeting.add_one_req),
        (f"{policy}.PrefillAdder.add_chunked_req", around, meeting.add_chunked_req),
        (f"{policy}.PrefillAdder.preempt_to_schedule", around, preemption.preempt_to_schedule),
        (f"{scheduler}._get_new_batch_prefill_raw", around, preemption.get_new_batch_prefill),
        (f"{scheduler}.__init__", around, hooks.build_scheduler),
        (f"{scheduler}._can_schedule_lora_req", after, hooks.adapter_fits),
        (f"{scheduler}.run_batch", around, hooks.run_batch),
        (f"{scheduler}.maybe_sleep_on_idle", around, hooks.sleep_on_idle),
        (f"{scheduler}.get_internal_state", after, hooks.internal_state),
        ("speculative.eagle_utils.eagle_sample", after, speculation.sampled),
        (f"{results}._resolve_spec_v2_tokens", after, speculation.accepted),
        (
            "mem_cache.kv_cache_builder.maybe_register_hicache_draft",
            around,
            speculation.register_draft,
        ),
        (f"{scheduler}._add_request_to_queue", before, namespaces.complete),
        (f"{scheduler}.handle_dumper_control", around, pins.control),
        (f"{scheduler}.handle_generate_request", around, entrance.admit),
        (f"{tokenizer}.generate_request", around, entrance.check_request),
        (f"{tokenizer}._create_tokenized_object", around, entrance.check_tokenized),
        (f"{tokenizer}._tokenize_one_request", before, overflow.own_ids),
        # The last of these runs first.
        (f"{tokenizer}._validate_one_request", before, overflow.cut_prompt),
        (f"{tokenizer}._validate_one_request", before, pins.check_pin_request),
        (f"{tokenizer}._validate_one_request", before, namespaces.pack_key),
        (f"{tokenizer}._validate_one_request", before, hooks.check_input_ids),
        (f"{serving}._compute_extra_key", around, namespaces.openai_key),
        (f"{chat}._convert_to_internal_request", after, overflow.count_head),
        (f"{tokenizer}._wait_one_response", around, overflow.tell),
        (f"{scheduler}.clear_hicache_storage_wrapped", around, hooks.clear_storage),
        (f"{tokenizer}.clear_hicache_storage", around, hooks.clear_everywhere),
        *((f"{updates}.{name}", around, hooks.change_weights) for name in hooks.REFUSED_UPDATE),
    ]
    if not torch.cuda.is_available():
        found.append((f"{backend}._run_sdpa_forward_extend", around, cpu_attention.extend))
    named = [(f"sglang.srt.{target}", kind, hook) for target, kind, hook in found]
    return [*named, ("uvicorn.run", around, worker.serve)]
