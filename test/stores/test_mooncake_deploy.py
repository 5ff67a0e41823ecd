"""The command lines of deploy/mooncake.yaml, run here: master, node and a server."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmark.harness.server import free_port
from support.core import MODELS
from support.dashboards import DEPLOY
from support.deployed import filled
from support.mooncake import MASTER, NODE, PATH, Programs, needs_mooncake
from support.prompts import prompt
from support.served import first_turn, generate, numbers, start

pytestmark = [pytest.mark.server, pytest.mark.slow, needs_mooncake]

HOST = "127.0.0.1"


def test_the_commands_of_the_example_work_together(models: None, tmp_path: Path) -> None:
    services = yaml.safe_load((DEPLOY / "mooncake.yaml").read_text())["services"]
    assert [services[name]["entrypoint"] for name in ("master", "node")] == [[MASTER], [NODE]]
    (tmp_path / "blocks").write_bytes(b"a" * 32)
    (tmp_path / "blocks").chmod(0o600)
    values = {"MASTER": HOST, "HOST": HOST, "MODEL": str(MODELS / "llama-mha")}
    values |= {"NODE_GB": "1", "HOST_GB": "0.2"}
    ports = {port: free_port() for port in ("50051", "50052", "8080", "9003")}

    def words(name: str) -> list[str]:
        return filled(
            services[name]["command"], values, {at: str(own) for at, own in ports.items()}
        )

    flags = [word.replace("/keys/", f"{tmp_path}/") for word in words("server")]
    with Programs(tmp_path) as store:
        store.run(MASTER, ports["50051"], *words("master"))
        store.run(NODE, ports["50052"], *words("node"))
        with start(tmp_path / "log", *flags, env=PATH) as server:
            saved = first_turn(server, prompt(1, 300), "remote_saved_blocks")
        with start(tmp_path / "log", *flags, env=PATH) as server:
            assert generate(server, saved.history, 16) == saved.answer
            assert numbers(server)["remote_loaded_blocks"] == saved.blocks
