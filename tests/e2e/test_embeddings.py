"""A cell with the real engine, asked by HTTP: it embeds and ranks, and computes the prompt of
several answers once.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from tokenizers import Tokenizer, processors

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import Unavailable, UnsupportedModel
from mesh.domain.ids import DeploymentName
from mesh.domain.model import Task
from mesh.domain.node_events import StepFinished
from mesh.domain.slo import Slo
from mesh.runtime.journal import read_journal
from tests.e2e.live_cell import WAIT_S_MAX, LiveCell, free_port
from tests.nodes.engines.openvino.embedders import embedders, write_embedder
from tests.support.tiny_model import BOS, EOS

PATIENT = Slo(ttft_s=WAIT_S_MAX)


def with_separators(folder: Path) -> Path:
    """Its tokenizer puts a token before and after each text, as those of encoders do."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}",
        pair=f"{BOS} $A {EOS} $B:1 {EOS}:1",
        special_tokens=[(BOS, 0), (EOS, 1)],
    )
    tokenizer.save(str(path))
    return folder


@dataclass(frozen=True, slots=True)
class Live:
    """A cell, and where it serves HTTP."""

    cell: LiveCell
    url: str
    journal: Path

    def prefilled(self) -> int:
        """How many tokens of prompts its node has computed so far."""
        _, decisions = read_journal(self.journal)
        steps = (one.event.result for one in decisions if isinstance(one.event, StepFinished))
        return sum(result.prefill_tokens for result in steps)

    def deploy(self, name: str, folder: Path, task: Task | None) -> None:
        deploy(self.cell, name, folder, task)

    def asked(self, path: str, status: int = 200, **body: Any) -> Any:
        answer = requests.post(self.url + path, json=body, timeout=WAIT_S_MAX)
        assert answer.status_code == status, answer.text
        return answer.json()


def deploy(cell: LiveCell, name: str, folder: Path, task: Task | None) -> None:
    cell.client.deploy(
        DeploymentSpec(name=DeploymentName(name), source=f"file://{folder}", slo=PATIENT, task=task)
    )


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, store_home: Path) -> Iterator[Live]:
    """One for all tests here."""
    cell = LiveCell(tmp_path_factory.mktemp("cell"), store_home)
    address = f"127.0.0.1:{free_port()}"
    cell.start_controller("--http", address)
    cell.journals = True
    node = cell.start_real_node("cpu0")
    yield Live(cell, f"http://{address}", node.journal)
    cell.close()


def test_texts_are_embedded_and_ranked(live: Live, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "bert", "bert", is_matryoshka=True)
    live.deploy("embeds", with_separators(folder), Task.EMBED)
    case = embedders()["bert"]["cases"][0]
    by_tokens = live.asked("/v1/embeddings", model="embeds", input=case["prompt"])
    (told,) = by_tokens["data"]
    assert float(np.array(told["embedding"]) @ np.array(case["vector"])) >= 0.999
    assert by_tokens["usage"] == {"prompt_tokens": 5, "total_tokens": 5}

    texts = [f"text {n}" for n in range(40)]
    listed = live.asked("/v1/embeddings", model="embeds", input=texts)
    vectors = np.array([one["embedding"] for one in listed["data"]])
    assert [one["index"] for one in listed["data"]] == list(range(40))
    assert listed["usage"]["prompt_tokens"] == sum(len(text) + 2 for text in texts)
    alone = live.asked("/v1/embeddings", model="embeds", input=texts[7], encoding_format="base64")
    held = np.frombuffer(base64.b64decode(alone["data"][0]["embedding"]), "<f4")
    assert float(held @ vectors[7]) >= 0.999
    few = live.asked("/v1/embeddings", model="embeds", input=texts[7], dimensions=8)
    (short,) = few["data"]
    assert short["embedding"] == pytest.approx(held[:8] / np.linalg.norm(held[:8]), abs=1e-3)

    ollama = live.asked("/api/embed", model="embeds:latest", input=texts[:2])
    assert np.array(ollama["embeddings"]) == pytest.approx(vectors[:2], abs=1e-2)

    ranked = live.asked("/v1/rerank", model="embeds", query=texts[7], documents=texts, top_n=3)
    assert ranked["results"][0]["index"] == 7
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-3)
    assert ranked["results"][0]["document"] == {"text": texts[7]}
    assert len(ranked["results"]) == 3

    for path, body, said in (
        ("/v1/embeddings", {"input": [4] * 300}, "context_length_exceeded"),
        ("/v1/embeddings", {"input": [4] * 300}, "is an encoder, and takes 256 tokens at most"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": []}, "1 to 2048"),
        ("/v1/embeddings", {"input": ""}, "empty"),
        ("/v1/embeddings", {"input": "a", "input_type": "query"}, "input_type"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 10_000}, "1000"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/completions", {"prompt": "a"}, "has task embed"),
    ):
        told = live.asked(path, status=400, model="embeds", **body)
        assert said in str(told["error"]), told


def test_a_head_that_scores_ranks_pairs(live: Live, tmp_path: Path) -> None:
    folder = with_separators(write_embedder(tmp_path / "scores", "bert-scores"))
    with pytest.raises(UnsupportedModel, match=r"spec\.task rerank"):
        live.deploy("scores", folder, None)
    with pytest.raises(UnsupportedModel, match="task rerank is what it can do"):
        live.deploy("scores", folder, Task.EMBED)
    live.deploy("scores", folder, Task.RERANK)
    documents: list[Any] = ["a text", {"text": "of another kind"}, "and one more"]
    both = [
        live.asked(path, model="scores", query="why?", documents=documents, return_documents=False)
        for path in ("/v1/rerank", "/v2/rerank")
    ]
    first, second = (told["results"] for told in both)
    scores = [one["relevance_score"] for one in first]
    assert scores == pytest.approx([one["relevance_score"] for one in second], abs=1e-3)
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert sorted(one["index"] for one in first) == [0, 1, 2]
    assert both[0]["usage"]["total_tokens"] == 3 * (len("why?") + 3) + 6 + 15 + 12
    told = live.asked("/v1/embeddings", status=400, model="scores", input="a")
    assert "has task rerank" in told["error"]["message"]


def test_a_decoder_that_generates_no_text_embeds(live: Live, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "qwen3", "qwen3")
    live.deploy("qwen", folder, Task.EMBED)
    case = embedders()["qwen3"]["cases"][1]
    (told,) = live.asked("/v1/embeddings", model="qwen", input=case["prompt"])["data"]
    assert float(np.array(told["embedding"]) @ np.array(case["vector"])) >= 0.999
    prompt = case["prompt"]
    told = live.asked("/v1/embeddings", status=400, model="qwen", input=prompt, dimensions=8)
    assert told["error"]["param"] == "dimensions"


def test_where_no_node_embeds_that_is_said(cell: LiveCell, tmp_path: Path) -> None:
    cell.start("n1")
    folder = write_embedder(tmp_path / "bert", "bert")
    with pytest.raises(Unavailable, match="has task embed; no node"):
        deploy(cell, "embeds", folder, Task.EMBED)


def test_eight_answers_to_one_prompt_are_those_of_eight_calls_and_compute_it_once(
    live: Live, tiny_model: Path
) -> None:
    """The eight calls have a salt each, so that they share nothing. The tiny model's tokens are
    bytes: a block has 32 of them.
    """
    live.deploy("chat", tiny_model, None)
    body: dict[str, Any] = {
        "model": "chat",
        "prompt": "p" * 200,
        "max_tokens": 6,
        "temperature": 1.0,
    }
    computed = [live.prefilled()]
    calls = [
        live.asked("/v1/completions", **body, seed=40 + n, cache_salt=f"{n}") for n in range(8)
    ]
    computed.append(live.prefilled())
    asked = {**body, "seed": 40, "n": 8, "cache_salt": "one"}
    together = live.asked("/v1/completions", **asked)
    computed.append(live.prefilled())

    alone = [call["choices"][0]["text"] for call in calls]
    assert [choice["text"] for choice in together["choices"]] == alone
    assert [choice["index"] for choice in together["choices"]] == list(range(8))
    usage = together["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 48)
    eight, one = np.diff(computed)
    assert eight == 8 * 200
    assert one <= 0.2 * eight

    best = live.asked("/v1/completions", **{**asked, "n": 2, "best_of": 8})
    told = [choice["text"] for choice in best["choices"]]
    assert set(told) <= set(alone)
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 48
    likeliest = [
        float(
            np.mean(
                live.asked("/v1/completions", **{**body, "seed": 40 + n, "logprobs": 0})["choices"][
                    0
                ]["logprobs"]["token_logprobs"]
            )
        )
        for n in range(8)
    ]
    assert told == [alone[n] for n in np.argsort([-one for one in likeliest], kind="stable")[:2]]
