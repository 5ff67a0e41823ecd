"""The steps of the campaign, in order of value: correctness first, then what decides most.

Minutes are estimates; nothing of this has run on a GPU yet.
"""

from __future__ import annotations

from benchmark.gpu.runner import Step
from benchmark.harness.core import FREE_LOADING

GPU, RESTORE = "benchmark.gpu", "benchmark.restore"
NO_HICACHE = "SGLang's hierarchical cache does not start without a GPU"
NO_KERNELS = (
    "Triton kernels are timed on a GPU; sgl-kernel-ext/test checks their values without one"
)
NO_DETERMINISM = "SGLang's deterministic inference has kernels for GPUs only"
FAMILIES = ("llama-gqa,mistral,qwen2,qwen3,gemma", "phi,opt,gpt2,granite,starcoder2")


def _restore(shape: str, histories: str, *words: str) -> tuple[str, ...]:
    return (f"{RESTORE}.run", "--shape", shape, "--histories", histories, *words)


def _served(script: str, shape: str, arm: str, *words: str) -> tuple[str, ...]:
    return (
        *(f"{GPU}.{script}", "--shape", shape, "--arms", arm),
        *("--output", "{scratch}", *words),
    )


def _chat(shape: str, arm: str, repeat: int = 1) -> tuple[str, ...]:
    return _served("multi_turn", shape, arm, "--rates", "1", "--repeat", str(repeat))


def _hicache(name: str, command: tuple[str, ...], minutes: float, about: str) -> Step:
    return Step(name, about, minutes, command, gpu_only=NO_HICACHE)


MHA, BIG, GQA = "llama-2-7b", "llama-2-13b", "llama-3.1-8b"

CALL_MINUTES = 9.0
CALLS = (
    ("device", "drift", "restore-7b"),
    ("chat-stock", "chat-auto", "copies-checked"),
    ("chat-hicache", "capture"),
)
"""The first steps, as calls of CALL_MINUTES do them in turn, each on a cold machine."""

STEPS = (
    Step(
        "device",
        "device facts, rates of every kind of copy, time of pinning",
        1.5,
        (f"{GPU}.device",),
        ("--rehearse",),
        takes_server_args=False,
    ),
    Step(
        "drift",
        "restored K/V of one family against the originals",
        3.0,
        (f"{RESTORE}.drift", "--models", "llama-mha", "--dtypes", "bfloat16"),
        ("--forms", "hidden"),
    ),
    Step(
        "restore-7b",
        "restorations of 1K to 16K tokens from host memory, adjacent and scattered slots",
        4.0,
        _restore(MHA, "1024,4096,16384"),
        ("--rehearse", "--histories", "512,1024", "--rounds", "2"),
    ),
    Step("chat-stock", "returning chats, plain SGLang", 3.0, _chat(MHA, "stock"), ("--rehearse",)),
    Step("chat-auto", "returning chats, sglang-hc", 3.5, _chat(MHA, "auto"), ("--rehearse",)),
    Step(
        "copies-checked",
        "tests of the copy lanes on this device",
        0.7,
        (f"{GPU}.checked", "test/device/test_copy_stream.py"),
        (),
        takes_server_args=False,
    ),
    _hicache("chat-hicache", _chat(MHA, "hicache"), 4.0, "returning chats, HiCache"),
    Step(
        "capture",
        "time between tokens with capture on and off",
        4.5,
        (f"{RESTORE}.capture", "--shape", MHA, "--repeats", "1"),
        ("--rehearse",),
    ),
    Step(
        "drift-deterministic",
        "the same under --enable-deterministic-inference",
        3.0,
        (f"{RESTORE}.drift", "--models", "llama-mha", "--dtypes", "bfloat16", "--deterministic"),
        gpu_only=NO_DETERMINISM,
    ),
    Step(
        "kernels",
        "kernels of sgl-kernel-ext against torch and sgl_kernel",
        2.0,
        (f"{GPU}.kernels", "--tokens", "1024", "4096", "--shapes", "mha-7b", "gqa-8b"),
        takes_server_args=False,
        gpu_only=NO_KERNELS,
    ),
    Step(
        "restore-8b",
        "restorations with grouped-query attention",
        3.5,
        _restore(GQA, "1024,4096,16384"),
        ("--rehearse", "--histories", "1024", "--rounds", "1"),
    ),
    Step(
        "smoke",
        "every arm starts, restores and says the same tokens",
        4.0,
        (f"{GPU}.smoke", "--models", "llama-mha", "--output", "{scratch}"),
        ("--arms", "stock,hidden", f"--server-args=--hc-profile {FREE_LOADING}"),
    ),
    Step(
        "ends",
        "conversations with windows, and with states, that left the device",
        4.0,
        ("benchmark.ends.returning", "--kinds", "windows,states", "--models", "{scratch}"),
        ("--rehearse", "--kinds", "windows"),
    ),
    Step(
        "restore-7b-disk",
        "restorations read from disk first",
        3.0,
        _restore(MHA, "4096,16384", "--disk", "{scratch}"),
        ("--rehearse", "--histories", "1024", "--rounds", "1"),
    ),
    Step(
        "idle-cost-stock",
        "throughput without reuse, plain SGLang",
        3.0,
        _served("overhead", MHA, "stock", "--repeat", "1"),
    ),
    Step(
        "idle-cost-auto",
        "throughput without reuse, sglang-hc",
        3.0,
        _served("overhead", MHA, "auto", "--repeat", "1"),
        ("--rehearse",),
    ),
    Step(
        "throughput",
        "weights and state in host memory: passes, and a conversation that returns",
        5.0,
        (
            *("benchmark.throughput.shares", "--shape", BIG, "--shares", "0,0.5,1"),
            *("--requests", "64", "--prompt", "1024", "--new", "64"),
        ),
        ("--rehearse",),
    ),
    Step(
        "kernels-checked",
        "tests of the kernels on this device",
        3.0,
        (f"{GPU}.checked", "sgl-kernel-ext/test"),
        takes_server_args=False,
        gpu_only="the tests run in Triton's interpreter without a GPU, as part of make test",
    ),
    *(
        Step(
            f"drift-families-{number}",
            f"restored K/V of {models}",
            4.0,
            (
                *(f"{RESTORE}.drift", "--models", models, "--dtypes", "bfloat16"),
                *("--forms", "hidden"),
            ),
        )
        for number, models in enumerate(FAMILIES, 1)
    ),
    Step("restore-13b", "restorations of 13B", 5.0, _restore(BIG, "1024,4096,16384")),
    _hicache(
        "chat-hicache-layer-first",
        _chat(MHA, "hicache-layer-first"),
        4.0,
        "returning chats, HiCache's other memory layout",
    ),
    _hicache(
        "chat-hicache-direct",
        _chat(MHA, "hicache-direct"),
        4.0,
        "returning chats, HiCache's other I/O back end",
    ),
    Step("chat-8b-stock", "returning chats, 8B, plain SGLang", 3.0, _chat(GQA, "stock")),
    _hicache("chat-8b-hicache", _chat(GQA, "hicache"), 4.0, "returning chats, 8B, HiCache"),
    Step("chat-8b-auto", "returning chats, 8B, sglang-hc", 3.5, _chat(GQA, "auto")),
    Step("chat-auto-again", "a second repeat, order reversed", 3.5, _chat(MHA, "auto", 2)),
    _hicache("chat-hicache-again", _chat(MHA, "hicache", 2), 4.0, "a second repeat"),
    Step("chat-stock-again", "a second repeat", 3.0, _chat(MHA, "stock", 2)),
    Step(
        "capture-again",
        "two more pairs of engines",
        5.0,
        (f"{RESTORE}.capture", "--shape", MHA, "--repeats", "3"),
    ),
    Step(
        "kernels-tiles",
        "other tiles and sizes of the kernels",
        5.0,
        (f"{GPU}.kernels", "--tiles"),
        takes_server_args=False,
        gpu_only=NO_KERNELS,
    ),
    Step(
        "restore-7b-more",
        "restorations of the lengths between",
        4.0,
        _restore(MHA, "2048,8192"),
    ),
    Step(
        "drift-dtypes",
        "restored K/V in float16 and float32",
        3.0,
        (f"{RESTORE}.drift", "--models", "llama-mha", "--dtypes", "float16,float32"),
    ),
)
