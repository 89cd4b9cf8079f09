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
EVALUATION_S_MAX = 250.0
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


def written(folder: Path, task: dict[str, Any], examples: Any) -> str:
    """The name of a task that is made of these examples, which lm-eval finds in the folder."""
    name = str(task["task"])
    lines = "".join(json.dumps(example) + "\n" for example in examples)
    (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    made = {
        **task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{begins}}",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
    return name


async def test_a_cell_is_evaluated_by_log_likelihoods_and_by_answers(url: str, home: Path) -> None:
    def says(begins: str) -> Any:
        asked = {"model": "chat", "prompt": begins, "max_tokens": TOKENS, "temperature": 0}
        answer = requests.post(f"{url}/v1/completions", json=asked, timeout=60)
        return answer.json()["choices"][0]["text"]

    folder = home / "tasks"
    folder.mkdir()
    chosen = written(
        folder,
        {
            "task": "ends",
            "output_type": "multiple_choice",
            "doc_to_choice": "{{ends}}",
            "doc_to_target": 0,
            "metric_list": [{"metric": "acc"}],
        },
        [
            {"begins": begins, "ends": [right, ENDS[n - 1][1]]}
            for n, (begins, right) in enumerate(ENDS)
        ],
    )
    said = written(
        folder,
        {
            "task": "says",
            "output_type": "generate_until",
            "doc_to_target": "{{says}}",
            "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": TOKENS, "temperature": 0},
            "metric_list": [{"metric": "exact_match"}],
        },
        [{"begins": begins, "says": await asyncio.to_thread(says, begins)} for begins, _ in ENDS],
    )
    model = {
        "model": "chat",
        "base_url": f"{url}/v1/completions",
        "tokenizer": str(home / "model"),
        "tokenizer_backend": "huggingface",
        "num_concurrent": "4",
    }
    words = ["--model", "local-completions", "--tasks", f"{chosen},{said}"]
    words += ["--include_path", str(folder), "--output_path", str(folder / "told")]
    words += ["--model_args", ",".join(f"{key}={value}" for key, value in model.items())]
    printed = await run_text(
        [sys.executable, "-m", "lm_eval", *words],
        seconds_max=EVALUATION_S_MAX,
        env={"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    (file,) = (folder / "told").rglob("results_*.json")
    told = json.loads(file.read_text(encoding="utf-8"))
    for name in (chosen, said):
        assert told["n-samples"][name]["effective"] == len(ENDS), printed
    assert told["results"][chosen]["acc,none"] >= 0.9
    assert told["results"][said]["exact_match,none"] == 1.0
