"""The commands of `deploy/` on this machine: the steps of the image, the server as compose starts
it, and the replicas of Kubernetes. No container is made, and no image is fetched."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmark.harness.server import ServerProcess
from support.core import MODELS
from support.dashboards import DEPLOY
from support.deployed import Image, built, filled
from support.prompts import prompt
from support.served import first_turn, generate, numbers, start, wait_for
from support.waiting import HANGS_S

pytestmark = [pytest.mark.server, pytest.mark.slow]

SMALL = ("--max-total-tokens", "640", "--dtype", "float32")
ADDRESS = ["--host", "0.0.0.0", "--port", "30000"]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return built(tmp_path_factory.mktemp("image"))


def test_the_steps_of_the_image_install_a_launcher(image: Image) -> None:
    where = image.run(["python3", "-c", "import sglang_hc; print(sglang_hc.__file__)"])
    assert Path(where.strip()).is_relative_to(image.programs.parent)
    assert "--hc-host-size-gb" in image.run([*image.start, *image.asked])


def test_the_image_serves_as_compose_starts_it(models: None, image: Image, tmp_path: Path) -> None:
    """And what it saved in the volumes is there when it is started again."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = compose["services"]["server"]
    values = {"MODEL": str(MODELS / "llama-mha"), "HOST_GB": "0.2", "DISK_GB": "1"}
    words = filled(service["command"], values, {"/blocks": str(tmp_path / "blocks")})
    *python, module = image.start[: -len(ADDRESS)]
    assert python == ["python3", "-m"] and image.start[-len(ADDRESS) :] == ADDRESS

    def serving() -> ServerProcess:
        env = {**image.environment, "PYTHONPATH": ""}
        found = image.programs / "python3"
        return ServerProcess(module, (*words, *SMALL), env, tmp_path / "log", python=str(found))

    with serving() as server:
        saved = first_turn(server, prompt(1, 300), "disk_saved_blocks")
        is_healthy(service, server)
    (costs,) = (v.split(":")[1] for v in service["volumes"] if v.startswith("costs:"))
    assert any(Path(f"{image.root}{costs}").iterdir()), "measured costs are kept in the volume"
    with serving() as server:
        assert numbers(server)["disk_blocks"] >= saved.blocks
        assert generate(server, saved.history, 16)[0] == saved.wanted


def is_healthy(service: dict[str, Any], server: ServerProcess) -> None:
    kind, *check = service["healthcheck"]["test"]
    assert kind == "CMD"
    if shutil.which(check[0]) is not None:
        subprocess.run(filled(check, {}, {"30000": str(server.port)}), check=True, timeout=HANGS_S)


def test_a_conversation_moves_between_the_replicas(models: None, tmp_path: Path) -> None:
    """Two at once, with the key as their first container leaves it."""
    (*_, replicas) = yaml.safe_load_all((DEPLOY / "kubernetes" / "replicas.yaml").read_text())
    pod = replicas["spec"]["template"]["spec"]
    (first,), (container,) = pod["initContainers"], pod["containers"]
    places = {path: str(tmp_path / path[1:]) for path in ("/secret", "/keys", "/shared")}
    for place in places.values():
        Path(place).mkdir()
    (tmp_path / "secret" / "blocks").write_bytes(b"k" * 32)
    (tmp_path / "secret" / "blocks").chmod(0o440)  # as a secret is mounted
    subprocess.run(filled(first["command"], {}, places), check=True)

    sizes = {"64": "0.2", "1800": "1", "MODEL": str(MODELS / "llama-mha")}
    words = filled(container["args"], {}, sizes | places)
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(start(tmp_path / f"log{number}", *words)) for number in (0, 1)
        )
        saved = first_turn(one, prompt(1, 300), "remote_saved_blocks")
        assert generate(other, saved.history, 16) == saved.answer
        wait_for(lambda: numbers(other)["remote_loaded_blocks"] == saved.blocks)
