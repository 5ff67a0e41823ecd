"""Nobody reaches through the tiers, no test imports another or changes the import path, and no file
is long. Where imports go is checked by `make lint`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def reaches(source: str) -> list[str]:
    """Expressions that go through the tiers to a part of one of their parts."""
    chains = (
        ast.unparse(one) for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Attribute)
    )
    return [chain for chain in chains if re.search(r"(^|\.)_?tiers\.\w+\.\w+$", chain)]


def test_nobody_reaches_through_the_tiers() -> None:
    """Who needs a part of theirs is given it when it is made; else they have the operation."""
    assert reaches("self._tree.tiers.queue.meetings.of(1)") == ["self._tree.tiers.queue.meetings"]
    assert reaches("self._tiers.host.tree") and reaches("tiers.disk.poll()")
    assert not reaches("self.tiers.poll() and tiers.host and import_tiers.host.tree")
    files = (ROOT / "python/sglang_hc/srt").rglob("*.py")
    found = {file.name: reaches(file.read_text()) for file in files}
    assert {name: chains for name, chains in found.items() if chains} == {}


BINDING = "python/sglang_hc/srt/binding"

OWNERS = {"args", "server_args", "ps", "req", "arguments.of"}
"""What SGLang's arguments, ranks and requests are called, and what gives the first of them."""

FIELDS = {
    *("server_args", "_hc_config", "ps", "tp_group", "pp_group", "world_group"),
    *("tp_rank", "tp_size", "pp_rank", "pp_size", "dp_rank", "dp_size"),
    *("rid", "extra_key", "cache_salt", "lora_id", "last_node", "req_pool_idx"),
    *("cache_request_handle", "prefix_len", "owned_kv_len", "kv_allocated_len"),
    *("host_hit_length", "storage_hit_length", "cache_protected_len", "kv_committed_len"),
    *("cached_tokens", "cached_tokens_host", "cached_tokens_storage", "inflight_middle_chunks"),
    *("full_untruncated_fill_ids", "origin_input_ids", "output_ids", "get_fill_ids"),
    *("_compute_max_prefix_len", "is_retracted", "retracted_stain"),
}
"""Their fields that have a name of their own, whatever their owner is called."""

SENT = {"self", "body", "recv_req", "result", "params"}
SENT_FIELDS = {"rid", "extra_key", "cache_salt", "host_hit_length"}
"""Of what is on its way to the scheduler, and what the tree is asked and answers: no requests."""

RANKS = {"get_parallel", "get_server_args", "get_world_group", "get_tp_group", "get_pp_group"}


def reads_of_sglang(source: str) -> list[str]:
    """Where a file reads or writes a field of SGLang's arguments, ranks or requests itself."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.asname or alias.name for node in imports for alias in node.names}
    found = [f"import {name}" for name in modules & RANKS]
    froms = [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    found += [module for module in froms if module.startswith("sglang.srt.distributed")]
    for node in nodes:
        owner, name = accessed(node)
        if owner in modules or name.isupper() or (owner in SENT and name in SENT_FIELDS):
            continue  # a function of ours, or an attribute of ours
        called = owner.partition("(")[0]
        if name in FIELDS or called in OWNERS or called.rpartition(".")[2] in OWNERS:
            found.append(ast.unparse(node))
    return found


def accessed(node: ast.AST) -> tuple[str, str]:
    """The object and the name of its attribute, if an expression takes one."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node.value), node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
        owner, name = node.args[:2]
        word = name.value if isinstance(name, ast.Constant) else ast.unparse(name)
        return ast.unparse(owner), str(word)
    return "", "NONE"


def test_one_room_reads_sglangs_arguments_ranks_and_requests() -> None:
    """So an upgrade that moves them changes that room (`srt/binding`)."""
    for planted in (
        "args.page_size", "getattr(args, name)", "runner.server_args", "arguments.of(one).dtype",
        "scheduler.ps.pp_size", "runner.tp_group.cpu_group", "from sglang.srt.distributed import x",
        "from sglang.srt.runtime_context import get_parallel", "req.anything", "params.req.rid",
        "one.prefix_len", "setattr(one, 'last_node', node)", "self._last.rid", "key.extra_key",
        "req.host_hit_length = 0", "hasattr(req, 'x')", "for x in batch.reqs: x.output_ids",
    ):  # fmt: skip
        assert reads_of_sglang(planted), planted
    for ours in (
        "from a import parallel\nparallel.tp_size(runner)", "fields.prefix_length(req)",
        "getattr(req, SERIAL)", "params.host_hit_length", "recv_req.rid", "f(params.req)", "f(rid)",
    ):  # fmt: skip
        assert not reads_of_sglang(ours), ours
    files = {
        file.relative_to(ROOT): file.read_text()
        for file in (ROOT / "python/sglang_hc/srt").rglob("*.py")
    }
    assert len(files) > 50 and any(reads_of_sglang(text) for text in files.values())
    found = {
        str(file): reads
        for file, text in files.items()
        if not file.is_relative_to(BINDING) and (reads := reads_of_sglang(text))
    }
    assert found == {}


def test_no_test_edits_the_import_path() -> None:
    """What tests share lies in test/support, which pytest finds; a process gets PYTHONPATH."""
    edit = re.compile(r"sys\.path(\.(insert|append|extend)|\[[^]]*\]\s*=|\s*\+?=[^=])")
    assert edit.search("sys" + ".path[:0] = ['here']") and edit.search("sys" + ".path.insert(0, x)")
    files = (ROOT / "test").rglob("*.py")
    assert [file for file in files if edit.search(file.read_text())] == []


def test_benchmarks_import_nothing_of_the_tests_and_the_package_nothing_of_both() -> None:
    tests = re.compile(r"^\s*(?:from|import) (?:support|test)\b", re.M)
    both = re.compile(r"^\s*(?:from|import) (?:support|test|benchmark)\b", re.M)
    assert tests.search("    from support.core import Core") and both.search("import benchmark")
    for folder, found in (("benchmark", tests), ("python", both)):
        files = list((ROOT / folder).rglob("*.py"))
        assert len(files) > 50
        assert [file for file in files if found.search(file.read_text())] == []


def imported_tests(source: str) -> list[str]:
    """Modules that a test must not import: tests, and whatever lies beside it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}"]
            names += [f"{names[0]}.{alias.name}" for alias in node.names]
        found += [name for name in names if name.startswith(".") or re.search(r"\btest_", name)]
    return found


def test_no_test_imports_another() -> None:
    """What two tests need lies in test/support."""
    for line in (
        "from .test_a import B",
        "from . import b",
        "import e2e.test_a",
        "from a import test_b",
    ):
        assert imported_tests(line), line
    assert not imported_tests("from support.core import Core\nimport pytest")
    files = (ROOT / "test").rglob("*.py")
    assert {file.name: found for file in files if (found := imported_tests(file.read_text()))} == {}


def test_no_file_is_longer_than_400_lines() -> None:
    """CONTRIBUTING.md: a longer file holds more than one thing."""
    folders = ("python", "test", "benchmark", "scripts", "sgl-kernel-ext")
    lengths = {
        file: len(file.read_text().splitlines())
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
    }
    assert len(lengths) > 100, "the repository is read as a whole"
    assert [file for file, lines in lengths.items() if lines > 400] == []
