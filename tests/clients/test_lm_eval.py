"""lm-evaluation-harness, unchanged, on a real cell: a task by log-likelihoods, one by answers."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from mesh_loader.store import StoredModel
from tests.clients.conftest import demo_cell, run_text

pytest.importorskip("lm_eval", reason="make test-clients has it")
pytestmark = pytest.mark.timeout(300)
EVALUATION_S_MAX = 200.0
ENDS = (
    ("The capital of France is", "Paris"),
    ("The capital of Germany is", "Berlin"),
    ("The capital of Italy is", "Rome"),
    ("The capital of Spain is", "Madrid"),
    ("The capital of Japan is", "Tokyo"),
    ("The opposite of hot is", "cold"),
    ("The opposite of up is", "down"),
    ("The opposite of black is", "white"),
    ("The day after Monday is", "Tuesday"),
    ("The day after Friday is", "Saturday"),
    ("The month after January is", "February"),
    ("The color of grass is", "green"),
    ("The color of the sky is", "blue"),
    ("Two plus two is", "four"),
    ("The sun rises in the", "east"),
    ("Water freezes into", "ice"),
    ("Cows give us", "milk"),
    ("Bees make", "honey"),
    ("A baby dog is called a", "puppy"),
    ("The Earth orbits the", "sun"),
)
"""The beginning of a sentence and its end; that of the next one is the wrong choice."""
TOKENS = 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lm-eval")


@pytest.fixture(scope="module")
def url(home: Path, smollm2_model: StoredModel) -> Iterator[str]:
    with demo_cell(home, smollm2_model, ["chat"]) as url:
        yield url


async def evaluated(url: str, home: Path, task: dict[str, Any], examples: Any) -> Any:
    """The results of a task that is made of these examples."""
    name = str(task["task"])
    folder = home / name
    folder.mkdir()
    lines = "".join(json.dumps(example) + "\n" for example in examples)
    (folder / "examples.jsonl").write_text(lines, encoding="utf-8")
    made = {
        **task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "examples.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{begins}}",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
    model = {
        "model": "chat",
        "base_url": f"{url}/v1/completions",
        "tokenizer": str(home / "model"),
        "tokenizer_backend": "huggingface",
        "num_concurrent": "4",
    }
    words = ["--model", "local-completions", "--tasks", name, "--include_path", str(folder)]
    words += ["--model_args", ",".join(f"{key}={value}" for key, value in model.items())]
    words += ["--output_path", str(folder / "told")]
    printed = await run_text(
        [sys.executable, "-m", "lm_eval", *words],
        seconds_max=EVALUATION_S_MAX,
        env={"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    (results,) = (folder / "told").rglob("results_*.json")
    told = json.loads(results.read_text(encoding="utf-8"))
    assert told["n-samples"][name]["effective"] == len(ENDS), printed
    return told["results"][name]


async def test_log_likelihoods_choose_what_follows(url: str, home: Path) -> None:
    examples = [
        {"begins": begins, "ends": [right, ENDS[n - 1][1]]}
        for n, (begins, right) in enumerate(ENDS)
    ]
    task = {
        "task": "ends",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    assert (await evaluated(url, home, task, examples))["acc,none"] >= 0.9


async def test_answers_are_what_the_cell_says(url: str, home: Path) -> None:
    def says(begins: str) -> Any:
        asked = {"model": "chat", "prompt": begins, "max_tokens": TOKENS, "temperature": 0}
        answer = requests.post(f"{url}/v1/completions", json=asked, timeout=60)
        return answer.json()["choices"][0]["text"]

    examples = [
        {"begins": begins, "says": await asyncio.to_thread(says, begins)} for begins, _ in ENDS
    ]
    task = {
        "task": "says",
        "output_type": "generate_until",
        "doc_to_target": "{{says}}",
        "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": TOKENS, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    assert (await evaluated(url, home, task, examples))["exact_match,none"] == 1.0
