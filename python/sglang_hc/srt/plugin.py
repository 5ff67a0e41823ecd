"""Entry point of the `sglang.srt.plugins` group: puts every hook in place.

SGLang loads plugins in the launcher and in every scheduler process, and only logs what a plugin
raises: `in_place.py` looks whether all is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.mem_cache.registry import (
    register_radix_cache_backend,
    registered_radix_cache_backends,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_hc.srt.engine import cpu, guard, in_place

_active = False


def activate() -> None:
    """Register everything. Called by SGLang's plugin loader; harmless when called again."""
    from sglang_hc.srt.arguments import server_args

    global _active  # noqa: PLW0603  one flag per process, as SGLang's own registry has
    if _active:
        return
    if not torch.cuda.is_available():
        cpu.enable()
    for hook in all_hooks():
        HookRegistry.register(hook.target, hook.guarded, hook.kind)
        in_place.expect(hook.target)
    for name, step in server_args.STEPS.items():
        register_resolution_hook(name)(step)
        in_place.expect_step(name, step)
    if in_place.BACKEND not in registered_radix_cache_backends():
        from sglang_hc.srt.start.build import build_tree_cache

        register_radix_cache_backend(in_place.BACKEND, build_tree_cache)
    _active = True


class Hook(NamedTuple):
    """`call` is put around SGLang's function `target`; `kind` says how, `on_error` what an error of
    `call` does. proof: where every request has to run it; None for what runs on occasion, or at the
    start, which does not go on without it."""

    target: str
    kind: HookType
    call: Callable[..., Any]
    on_error: guard.Guarded | guard.Tokenizer | guard.Unguarded
    proof: in_place.Proof | None = None

    @property
    def guarded(self) -> Callable[..., Any]:
        """`call`, whose errors do what `on_error` says."""
        call = guard.guarded(self.call, self.kind, self.on_error)
        if self.proof is None:
            return call
        return in_place.noted(f"{self.target} ({guard.name_of(self.call)})", call, self.proof)


def all_hooks() -> list[Hook]:
    """Every hook."""
    from sglang_hc.srt.arguments import server_args
    from sglang_hc.srt.hybrid import build as streamed
    from sglang_hc.srt.model import cpu_attention, model_state, offload
    from sglang_hc.srt.requests import (
        agents,
        breakpoints,
        entrance,
        images,
        namespaces,
        overflow,
        pins,
        recording,
        self_test,
        tools,
    )
    from sglang_hc.srt.scheduling import hooks, meeting, speculation, weights
    from sglang_hc.srt.tree import prompt_sources

    after, around, before = HookType.AFTER, HookType.AROUND, HookType.BEFORE
    asked, served = in_place.Proof.TOKENIZER, in_place.Proof.SCHEDULER
    args = "sglang.srt.server_args.ServerArgs"
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    policy = "sglang.srt.managers.schedule_policy"
    adder = f"{policy}.PrefillAdder"
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    parts = "sglang.srt.managers.scheduler_components"
    updates = f"{parts}.weight_updater.SchedulerWeightUpdaterManager"
    results = f"{parts}.batch_result_processor.SchedulerBatchResultProcessor"
    streamer = f"{parts}.output_streamer.SchedulerOutputStreamer"
    tokenizer = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    http = "sglang.srt.entrypoints.http_server"
    chat = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
    sample = "sglang.srt.speculative.eagle_utils.eagle_sample"
    pools = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    components = "sglang.srt.model_executor.model_runner_components"
    backends = f"{components}.attention_backend_setup.build_attention_backends"
    fuses = "sglang.srt.models.utils.enable_fused_set_kv_buffer"
    draft = "sglang.srt.mem_cache.kv_cache_builder.maybe_register_hicache_draft"
    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"

    keeps, give_up, as_400 = guard.Guarded(), guard.Guarded(guard.give_up), guard.Tokenizer()
    alone = guard.Guarded(guard.like_no_other)
    start = guard.Unguarded("a server that is not as it was asked for does not start")
    ends = guard.Unguarded("without it nothing would end the restorations of a pass")
    forward = guard.Unguarded("its parts are guarded; what is around them is SGLang's pass")
    answer = guard.Unguarded("its errors are answers to their client already")
    cleared = guard.Unguarded("an error is no answer that everything is gone")
    reply = guard.Unguarded("it only adds to a reply")
    often = guard.Unguarded("its parts are guarded; it is asked for each token of a reply")
    model = guard.Unguarded("it is the model's own arithmetic")
    found = [
        Hook(f"{args}.add_cli_args", after, server_args.add_cli_args, start),
        Hook(f"{args}.from_cli_args", around, server_args.from_cli_args, start),
        Hook(f"{runner}.load_model", before, offload.before_load_model, start),
        Hook(f"{runner}.load_model", after, model_state.after_load_model, start),
        Hook(f"{pools}._profile_available_bytes", around, streamed.available_bytes, start),
        Hook(f"{pools}._build_mha_kv_pool", around, streamed.build_pool, start),
        Hook(f"{pools}._build_token_to_kv_pool_allocator", around, streamed.build_allocator, start),
        Hook(backends, around, streamed.build_attention, start),
        Hook(fuses, around, streamed.fuses_write, model),
        Hook(f"{scheduler}.__init__", around, hooks.build_scheduler, start),
        Hook(f"{http}._wait_and_warmup", around, self_test.wait_and_warmup, start),
        Hook(draft, around, speculation.register_draft, start),
        Hook(f"{runner}.forward", around, hooks.forward, forward, served),
        Hook(f"{scheduler}.run_batch", around, hooks.run_batch, ends, served),
        Hook(f"{scheduler}.run_batch", after, hooks.batch_ran, keeps, served),
        Hook(f"{policy}.SchedulePolicy.calc_priority", after, hooks.arrange, keeps, served),
        Hook(f"{adder}.add_one_req", around, meeting.add_one_req, give_up, served),
        Hook(f"{adder}.add_chunked_req", around, meeting.add_chunked_req, give_up),
        Hook(f"{adder}.preempt_to_schedule", around, hooks.preempt_to_schedule, give_up),
        Hook(f"{scheduler}.maybe_sleep_on_idle", around, hooks.sleep_on_idle, keeps),
        Hook(f"{scheduler}.get_internal_state", after, hooks.internal_state, keeps),
        Hook(f"{streamer}.get_cached_tokens_details", after, prompt_sources.told, often),
        Hook(sample, after, speculation.sampled, keeps),
        Hook(f"{results}._resolve_spec_v2_tokens", after, speculation.accepted, keeps),
        Hook(f"{scheduler}._add_request_to_queue", before, namespaces.complete, alone, served),
        Hook(f"{scheduler}._add_request_to_queue", before, recording.queued, keeps, served),
        Hook(f"{scheduler}.process_batch_result", after, recording.processed, keeps),
        Hook(f"{scheduler}.handle_generate_request", around, entrance.admit, keeps, served),
        Hook(f"{scheduler}.handle_dumper_control", around, pins.control, answer),
        Hook(f"{tokenizer}.generate_request", around, entrance.check_request, as_400, asked),
        Hook(
            f"{tokenizer}._create_tokenized_object", around, entrance.check_tokenized, answer, asked
        ),
        Hook(f"{tokenizer}._tokenize_one_request", before, overflow.own_ids, as_400, asked),
        Hook(f"{tokenizer}._tokenize_one_request", around, images.name_images, answer, asked),
        # The last of these runs first.
        Hook(f"{tokenizer}._validate_one_request", before, overflow.cut_prompt, as_400, asked),
        Hook(f"{tokenizer}._validate_one_request", before, pins.check_pin_request, as_400, asked),
        Hook(f"{tokenizer}._validate_one_request", before, agents.check_retain, as_400, asked),
        Hook(f"{tokenizer}._validate_one_request", before, namespaces.pack_key, as_400, asked),
        Hook(f"{tokenizer}._validate_one_request", before, hooks.check_input_ids, as_400, asked),
        Hook(f"{chat}._convert_to_internal_request", after, overflow.count_head, as_400),
        Hook(f"{chat}._convert_to_internal_request", after, breakpoints.read, as_400),
        Hook(f"{chat}._convert_to_internal_request", after, tools.name_tools, as_400),
        Hook(f"{tokenizer}._wait_one_response", around, overflow.tell, reply, asked),
        Hook(f"{scheduler}.clear_hicache_storage_wrapped", around, hooks.clear_storage, cleared),
        Hook(f"{tokenizer}.clear_hicache_storage", around, hooks.clear_everywhere, cleared),
        *(
            Hook(f"{updates}.{name}", around, hooks.change_weights, guard.STALE)
            for name in weights.UPDATES
        ),
        *(
            Hook(f"{updates}.{name}", around, weights.move_weights, guard.STALE)
            for name in weights.IN_MEMORY
        ),
        *(
            Hook(f"{updates}.{name}", around, weights.use_weights, answer)
            for name in weights.OTHERS
        ),
    ]
    if not torch.cuda.is_available() and os.environ.get(cpu.SGLANGS_ATTENTION) != "1":
        extend = f"{backend}._run_sdpa_forward_extend"
        found.append(Hook(extend, around, cpu_attention.extend, model))
    return found
