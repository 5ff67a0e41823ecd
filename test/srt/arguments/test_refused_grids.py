"""Which replicas, ranks and stages are served together, and which are refused in one sentence."""

from __future__ import annotations

import argparse

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_hc.config import ConfigError, HcConfig
from sglang_hc.srt.arguments.server_args import refuse_modes


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path", "model", *flags])


TP, PP, DP = ("--tp-size", "2"), ("--pp-size", "2"), ("--dp-size", "2")
NGRAM = ("--speculative-algorithm", "NGRAM")


@pytest.mark.parametrize("flags", [TP, PP, DP, TP + PP, TP + DP, PP + DP, TP + NGRAM, DP + NGRAM])
def test_any_two_are_served(flags: tuple[str, ...]) -> None:
    refuse_modes(arguments(*flags), HcConfig())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (TP + PP + DP, "--dp-size and --tp-size above 1 with --pp-size above 1"),
        (PP + NGRAM, "--speculative-algorithm with --pp-size above 1"),
    ],
)
def test_what_is_not_served_is_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_modes(arguments(*flags), HcConfig())
    assert said in str(refused.value) and "--hc-disable" in str(refused.value)
