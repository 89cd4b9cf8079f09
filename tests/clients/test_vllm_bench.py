"""vLLM's own load generator, `vllm bench serve`, by completions and by chats: nothing fails."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Served, run_text
from tests.support.tiny_model import write_tiny_llama

pytest.importorskip("vllm", reason="make test-vllm has it")

IMPORTED_S_MAX = 180.0
"""The client imports vLLM, which takes a minute where others compute."""
CLIENT = """
import argparse, vllm.benchmarks.serve as serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
"""What `vllm bench serve` runs; the CPU build's command does not find its own version."""
PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS = 8, 12, 5


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
async def test_all_that_it_asks_is_answered(
    served: Served, tmp_path: Path, backend: str, endpoint: str
) -> None:
    options: dict[str, Any] = {
        "backend": backend,
        "endpoint": endpoint,
        "base-url": served.url.removesuffix("/v1"),
        "model": "chat",
        "tokenizer": write_tiny_llama(tmp_path / "tokenizer"),
        "dataset-name": "random",
        "random-input-len": INPUT_TOKENS,
        "random-output-len": OUTPUT_TOKENS,
        "num-prompts": PROMPTS,
        "max-concurrency": 2,
        "result-dir": tmp_path,
        "result-filename": "result.json",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    printed = await run_text(
        [sys.executable, "-c", CLIENT, *words, "--save-result", "--disable-tqdm"],
        seconds_max=IMPORTED_S_MAX,
    )
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["completed"], result["failed"]) == (PROMPTS, 0), printed
    assert result["total_output_tokens"] == PROMPTS * OUTPUT_TOKENS
