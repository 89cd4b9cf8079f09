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
import argparse, json, sys, vllm.benchmarks.serve as serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
for words in sys.argv[1:]:
    serve.main(parser.parse_args(json.loads(words)))
"""
"""What `vllm bench serve` runs, for each of these lists of words; the CPU build's command does not
find its own version.
"""
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS = 8, 12, 5


async def test_all_that_it_asks_is_answered(served: Served, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "base-url": served.url.removesuffix("/v1"),
        "model": "chat",
        "tokenizer": write_tiny_llama(tmp_path / "tokenizer"),
        "dataset-name": "random",
        "random-input-len": INPUT_TOKENS,
        "random-output-len": OUTPUT_TOKENS,
        "num-prompts": PROMPTS,
        "max-concurrency": 2,
        "result-dir": tmp_path,
    }
    runs = [
        options | {"backend": backend, "endpoint": endpoint, "result-filename": f"{backend}.json"}
        for backend, endpoint in ENDPOINTS.items()
    ]
    words = [
        [word for name, value in run.items() for word in (f"--{name}", str(value))] for run in runs
    ]
    asked = [json.dumps([*each, "--save-result", "--disable-tqdm"]) for each in words]
    printed = await run_text([sys.executable, "-c", CLIENT, *asked], seconds_max=IMPORTED_S_MAX)
    for run in runs:
        result = json.loads((tmp_path / run["result-filename"]).read_text(encoding="utf-8"))
        assert (result["completed"], result["failed"]) == (PROMPTS, 0), printed
        assert result["total_output_tokens"] == PROMPTS * OUTPUT_TOKENS
