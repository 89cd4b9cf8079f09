"""Greedy tokens of a model as transformers computes them, for the OpenVINO engine's exactness test.

Run by hand, in an environment of its own (`pip install torch transformers safetensors`), over a
model's folder in the store; the result is kept in the tree, so that tests need neither library.

    python scripts/golden_tokens.py STORE/models/ID tests/data/golden_smollm2.json
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

OUTPUT_TOKENS = 48

STORY = (
    "The lighthouse keeper climbed the stairs every evening at dusk. He had done so for thirty "
    "years, and he knew each of the two hundred and twelve steps by the sound that it made under "
    "his boots. At the top he trimmed the wick, wiped the great lens with a soft cloth, and lit "
    "the lamp. Then he sat by the window with a cup of tea, and watched the ships go by. "
)
BOILING = (
    "Water boils at one hundred degrees Celsius at sea level, but on a high mountain it boils at a "
    "lower temperature. The reason is that"
)
PROMPTS = (
    "Gravity is",
    "The capital of France is the city of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "<|im_start|>user\nName three colours of the rainbow.<|im_end|>\n<|im_start|>assistant\n",
    BOILING,
    STORY,
    f"Summarise the following story in one sentence.\n\n{STORY}\n\nSummary:",
    f"{STORY * 4}One night the lamp would not light, and",
)
"""From a few tokens to about three hundred, so that chunks, blocks and batches all differ."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a model's folder in the store")
    parser.add_argument("output", type=Path, help="the JSON file to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None  # every case runs to its full length
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(arguments.model / "tokenizer.json")
    )
    golden = {
        "model": json.loads((arguments.model / "model.json").read_text())["source"],
        "dtype": "weights as stored, computed in float32",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "cases": [_case(model, tokenizer, prompt) for prompt in PROMPTS],
    }
    arguments.output.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


def _case(model: Any, tokenizer: Any, prompt: str) -> dict[str, list[int]]:
    """Prompt and greedy output token ids."""
    prompt_ids = tokenizer.encode(prompt)
    output_ids, closest = continued(model, prompt_ids, OUTPUT_TOKENS)
    print(len(prompt_ids), "prompt tokens, closest call", closest)
    return {"prompt": prompt_ids, "output": output_ids}


def continued(model: Any, prompt: list[int], output_tokens: int) -> tuple[list[int], float]:
    """So many greedy tokens, and how far the runner-up's logit was at the closest."""
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=output_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack(output.logits).squeeze(1).topk(2, dim=-1).values
    return output.sequences[0, len(prompt) :].tolist(), float((top[:, 0] - top[:, 1]).min())


if __name__ == "__main__":
    main()
