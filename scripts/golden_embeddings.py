"""Embeddings and scores of tiny models as transformers computes them, for the contract
suite's test of vectors.

Run by hand from the repository's root, in an environment of its own (`pip install torch
transformers safetensors`); the result is kept in the tree, so that tests need neither library.

    python -m scripts.golden_embeddings
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.numpy import load_file

from tests.nodes.engines.openvino.embedders import GOLDEN
from tests.nodes.engines.openvino.families import write_family

PROMPT_TOKENS = (5, 33, 90)
SEPARATOR = 1
"""It ends a query and a document."""
SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
DECODER: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 32}
ONE = {"num_labels": 1}
AutoModel, AutoScorer = transformers.AutoModel, transformers.AutoModelForSequenceClassification
MODELS: dict[str, tuple[Any, Any, str]] = {
    "bert": (AutoModel, transformers.BertConfig(**SIZES), "mean"),
    "xlm-roberta": (
        AutoModel,
        transformers.XLMRobertaConfig(**SIZES, type_vocab_size=1, layer_norm_eps=1e-5),
        "cls",
    ),
    "qwen3": (AutoModel, transformers.Qwen3Config(**SIZES, **DECODER), "last"),
    "mistral": (AutoModel, transformers.MistralConfig(**SIZES, **DECODER), "mean"),
    "bert-scores": (AutoScorer, transformers.BertConfig(**SIZES, **ONE), "score"),
    "xlm-roberta-scores": (
        AutoScorer,
        transformers.XLMRobertaConfig(**SIZES, **ONE, type_vocab_size=1),
        "score",
    ),
}


def main() -> None:
    golden = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": "weights in f16, computed in float32",
        "models": {name: _model(name, *told) for name, told in MODELS.items()},
    }
    GOLDEN.write_text(json.dumps(golden) + "\n", encoding="utf-8")


def _model(name: str, kind: Any, config: Any, pooling: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        saved, folder = Path(scratch) / "saved", Path(scratch) / "drawn"
        kind.from_config(config).save_pretrained(saved)
        stored = load_file(saved / "model.safetensors")
        shapes = {key: list(tensor.shape) for key, tensor in stored.items()}
        written = json.loads((saved / "config.json").read_text())
        write_family(folder, written, shapes)
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    draw = random.Random(name)
    cases = []
    for count in PROMPT_TOKENS:
        prompt = [draw.randrange(4, 258) for _ in range(count)]
        if pooling == "score":
            prompt = [2, *prompt[: count // 3], SEPARATOR, *prompt, SEPARATOR]
        cases.append({"prompt": prompt, "vector": _vector(model, prompt, pooling)})
    return {"config": written, "shapes": shapes, "pooling": pooling, "cases": cases}


def _vector(model: Any, prompt: list[int], pooling: str) -> list[float]:
    given: dict[str, Any] = {"input_ids": torch.tensor([prompt])}
    if pooling == "score" and model.config.type_vocab_size > 1:
        second = prompt.index(SEPARATOR) + 1
        given["token_type_ids"] = torch.tensor([[int(n >= second) for n in range(len(prompt))]])
    with torch.no_grad():
        output = model(**given)
    if pooling == "score":
        return [float(torch.sigmoid(output.logits[0, 0]))]
    states = output.last_hidden_state[0]
    vector = {"mean": states.mean(dim=0), "cls": states[0], "last": states[-1]}[pooling]
    return [round(float(x), 7) for x in torch.nn.functional.normalize(vector, dim=0)]


if __name__ == "__main__":
    main()
