"""Starts that must fail say why in one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.core import MODELS, run_in_child
from support.waiting import HANGS_S

MODEL = ("--model-path", str(MODELS / "llama-mha"))
ROOT = Path(__file__).resolve().parents[2]


def refusal(argv: tuple[str, ...]) -> tuple[object, str]:
    """Exit status and stderr of a launch that never gets as far as a server."""
    import sglang.launch_server

    def served(args: object) -> None:
        raise AssertionError("the server was started")

    sglang.launch_server.run_server = served
    from sglang_hc.srt.start.launch import launch

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            status: object = launch(argv)
        except SystemExit as end:
            status = end.code
    return status, said.getvalue()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--hc-forms", "squeezed"), ("--hc-forms", "squeezed")),
        (("--hc-forms", "hidden:20,kv:12"), ("--hc-forms", "32 layers", "has 4")),
        (("--hc-forms", "recompute:4"), ("--hc-forms", "keeps nothing", "--hc-disable")),
        (
            ("--hc-forms", "recompute:1,kv:3", "--enable-lora", "--lora-paths", "a=b"),
            ("--hc-forms", "adapters", "use hidden and kv counts"),
        ),
        (("--hc-host-size-gb", "-1"), ("--hc-host-size-gb", "above 0")),
        (("--hc-host-size-gb", "many"), ("--hc-host-size-gb", "float")),
        (("--hc-host-size-gb", "1e6"), ("--hc-host-size-gb", "memory")),
        (("--tp-size", "2", "--nnodes", "2"), ("--nnodes", "--tp-size", "--hc-disable")),
        (
            ("--tp-size", "2", "--hc-overflow", "reembed"),
            ("--hc-overflow reembed", "--tp-size", "--hc-disable"),
        ),
        (
            ("--tp-size", "2", "--enable-attn-tp-input-scattered"),
            ("--enable-attn-tp-input-scattered", "--hc-disable"),
        ),
        (("--pp-size", "2", "--nnodes", "2"), ("--nnodes", "--pp-size", "--hc-disable")),
        (("--pp-size", "2", "--hc-overflow", "reembed"), ("--hc-overflow reembed", "--pp-size")),
        (("--pp-size", "2", "--hc-exact"), ("--hc-exact", "--pp-size", "--hc-disable")),
        (("--pp-size", "2", "--enable-lora"), ("--enable-lora", "--pp-size", "--hc-disable")),
        (
            ("--pp-size", "2", "--pp-async-batch-depth", "1"),
            ("--pp-async-batch-depth", "--pp-size"),
        ),
        (
            ("--pp-size", "2", "--enable-dynamic-chunking"),
            ("--enable-dynamic-chunking", "--hc-disable"),
        ),
        (("--speculative-algorithm", "DFLASH"), ("algorithm DFLASH", "--hc-disable")),
        (("--speculative-algorithm", "NGRAM"), ("algorithm NGRAM", "needs a GPU")),
        (
            ("--hc-overflow", "reembed", "--speculative-draft-model-path", "some"),
            ("--hc-overflow reembed", "--speculative-draft-model-path", "recompute"),
        ),
        (
            ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
            ("--attn-dp-size above 1", "--enable-dp-attention", "--hc-disable"),
        ),
        (("--tp-size", "2", "--attn-dp-size", "2"), ("--attn-dp-size above 1", "--hc-disable")),
        (("--enable-prefill-cp",), ("--enable-prefill-cp", "--hc-disable")),
        (("--enable-layernorm-sp",), ("--enable-layernorm-sp", "--hc-disable")),
        (("--enable-kv-cache-sharding",), ("--enable-kv-cache-sharding", "--hc-disable")),
        (("--enable-nvidia-megakernel",), ("--enable-nvidia-megakernel", "skip the taps")),
        (("--enable-amd-monokernel",), ("--enable-amd-monokernel", "skip the taps")),
        (("--startup-weight-load-mode", "overlap"), ("load-mode overlap", "--hc-disable")),
        (("--enable-mis",), ("--enable-mis", "--hc-disable")),
        (("--elastic-ep-backend", "nixl"), ("--elastic-ep-backend", "--hc-disable")),
        (("--use-ray",), ("--use-ray", "--hc-disable")),
        (("--encoder-only",), ("--encoder-only", "nothing returns", "--hc-disable")),
        (
            ("--attention-backend", "triton", "--cuda-graph-backend-prefill", "full"),
            ("--cuda-graph-backend-prefill full", "breakable or disabled", "--hc-disable"),
        ),
        (("--cpu-offload-gb", "4"), ("--cpu-offload-gb", "--hc-disable")),
        (("--offload-group-size", "2"), ("--offload-group-size", "--hc-disable")),
        *(
            (("--hc-offload-gb", "1", *flags), ("--hc-offload-gb and", flags[0], "leave one"))
            for flags in (
                ("--enable-lora",),
                ("--lora-paths", "a=b"),
                ("--speculative-algorithm", "NGRAM"),
                ("--enable-eplb",),
                ("--kt-weight-path", "/tmp/experts"),
                ("--enable-memory-saver",),
                ("--enable-weights-cpu-backup",),
                ("--weight-cache-mode", "daemon"),
                ("--load-format", "layered"),
                ("--load-format", "sharded_state"),
                ("--quantization", "bitsandbytes"),
                ("--cuda-graph-backend-decode", "full"),
                ("--cuda-graph-backend-prefill", "breakable"),
                ("--cuda-graph-backend-prefill", "full"),
                ("--remote-instance-weight-loader-start-seed-via-transfer-engine",),
            )
        ),
        (
            ("--hc-offload-gb", "1", "--cpu-offload-gb", "4"),
            ("--cpu-offload-gb", "--hc-offload-gb leaves them in host memory too"),
        ),
        (("--hc-offload-gb", "1", "--offload-group-size", "2"), ("--offload-group-size",)),
        (("--hc-offload-gb", "1", "--enable-torch-compile"), ("--enable-torch-compile",)),
        (("--hc-offload-gb", "1", "--enable-two-batch-overlap"), ("--enable-two-batch-overlap",)),
        (("--hc-offload-gb", "many"), ("--hc-offload-gb", "GiB or auto")),
        (("--disable-radix-cache",), ("--disable-radix-cache", "--hc-disable")),
        # Both were taken without a word, and never built.
        (("--enable-lmcache",), ("--enable-lmcache", "--hc-disable")),
        (("--enable-flexkv",), ("--enable-flexkv", "--hc-disable")),
        (
            ("--enable-unified-cache-external-linker",),
            ("--enable-unified-cache-external-linker", "--hc-disable"),
        ),
        (("--grammar-backend", "xgrammar"), ("--grammar-backend xgrammar", "needs a GPU")),
        (("--smg-grpc-mode",), ("--smg-grpc-mode", "without the checks", "--hc-disable")),
        (("--grpc-mode",), ("--grpc-mode", "without the checks", "--hc-disable")),
        (
            ("--enable-http2", "--tokenizer-worker-num", "2"),
            ("--enable-http2 with --tokenizer-worker-num above 1", "--hc-disable"),
        ),
        (
            ("--hc-disk", "/tmp/hc-a:1", "--hc-disk", "/tmp/./hc-a/"),
            ("/tmp/hc-a is given more than once", "--hc-disk"),
        ),
        (("--hc-remote", "nixl"), ("--hc-remote nixl", "package nixl", "install")),
        (("--hc-remote", "file"), ("--hc-remote file", "directory", "--hc-remote-config")),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_an_option_that_cannot_be_is_refused(
    models: None, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    status, said = run_in_child(refusal, (*MODEL, *flags))
    assert status == 2
    assert all(word in said for word in words), said
    assert "Traceback" not in said and "usage:" not in said
    assert sum("error:" in line or line.startswith("sglang-hc:") for line in said.splitlines()) == 1


def refusal_with(name: str, value: str) -> tuple[object, str]:
    os.environ[name] = value
    return refusal(MODEL)


def test_sglangs_server_in_rust_is_refused(models: None) -> None:
    """It has a tokenizer of its own, without our checks and namespaces, and no flag chooses it."""
    status, said = run_in_child(refusal_with, "SGLANG_RUST_SERVER", "1")
    assert status == 2 and "Traceback" not in said
    assert "SGLANG_RUST_SERVER" in said and "without the checks" in said


def test_a_pool_that_is_sized_behind_cuda_graphs_is_refused(models: None) -> None:
    status, said = run_in_child(refusal_with, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    assert status == 2 and "Traceback" not in said
    assert "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING" in said and "--hc-disable" in said


def test_another_application_for_tokenizer_workers_is_refused(models: None) -> None:
    """They would check nothing."""
    status, said = run_in_child(refusal_with, "SGLANG_HTTP_SERVER_APP_PATH", "my.server:app")
    assert status == 2 and "SGLANG_HTTP_SERVER_APP_PATH" in said and "Traceback" not in said


def refusal_of(model: Path) -> tuple[object, str]:
    return refusal(("--model-path", str(model)))


def test_what_sglang_chooses_for_a_model_is_refused_as_well(models: None, tmp_path: Path) -> None:
    """No flag asks for it: SGLang itself serves such a model for embeddings, and only these."""
    config = json.loads((MODELS / "llama-mha" / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaEmbeddingModel"]})
    )
    status, said = run_in_child(refusal_of, tmp_path)
    assert status == 2 and "Traceback" not in said
    assert "--is-embedding" in said and "--hc-disable" in said


def test_a_family_that_cannot_recompute_is_refused_with_such_a_plan(
    models: None, tmp_path: Path
) -> None:
    config = json.loads((MODELS / "llama-mha" / "config.json").read_text())
    changed = {**config, "architectures": ["InternLM3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    argv = ("--model-path", str(tmp_path), "--hc-forms", "recompute:1,kv:3")
    status, said = run_in_child(refusal, argv)
    assert status == 2
    lines = [line for line in said.splitlines() if line.startswith("sglang-hc:")]
    assert len(lines) == 1 and "--hc-forms recompute:1,kv:3: layers cannot be" in lines[0]
    assert "InternLM3ForCausalLM" in lines[0]


@pytest.mark.parametrize("empty", [True, False])
def test_a_path_without_a_model_is_refused(models: None, tmp_path: Path, empty: bool) -> None:
    path = tmp_path if empty else tmp_path / "nothing"
    status, said = run_in_child(refusal, ("--model-path", str(path)))
    assert status == 2
    assert said.startswith("sglang-hc: --model-path") and len(said.splitlines()) == 1


def test_a_launch_without_the_hooks_is_refused(models: None) -> None:
    """In a process of its own: children of this one inherit the hooks."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang_hc.launch_server", *MODEL],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "SGLANG_PLUGINS": "other"},
        capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("sglang-hc:")]
    assert len(lines) == 1 and "radix cache backend 'hc'" in lines[0]
    assert "pip install . in" in lines[0] and "keep hc in SGLANG_PLUGINS" in lines[0]
