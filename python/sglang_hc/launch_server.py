"""`python -m sglang_hc.launch_server`: SGLang's server with the tiers; takes every SGLang flag.

python -m sglang_hc.launch_server --model-path MODEL [SGLang flags] [--hc-* flags]
"""

from __future__ import annotations

import sys


def main() -> int:
    """Start the server; returns when it ends. Exit status 2 for a wrong option or model."""
    from sglang_hc.srt.start.launch import launch

    status: int = launch(sys.argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
