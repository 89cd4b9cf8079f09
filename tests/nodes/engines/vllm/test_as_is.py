"""An architecture that mesh does not know is taken as it is, and computed as by transformers."""

import json
import subprocess
import sys
from pathlib import Path

from mesh.domain.request import SamplingParams
from mesh_loader.store import ModelStore
from mesh_nodes.engines.vllm import VllmEngine, served_architectures
from tests.nodes.engines.serving import INSTANCE, load, request, run
from tests.support.tiny_model import write_tiny_llama

PROMPTS = [list(range(10, 60)), list(range(200, 230))]
OUTPUT_TOKENS = 24
MAKE = """
import json, sys
import torch
from transformers import GraniteConfig, GraniteForCausalLM

folder, prompts, count = json.loads(sys.argv[1])
torch.manual_seed(7)
config = GraniteConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
    pad_token_id=None, bos_token_id=None, eos_token_id=1, initializer_range=0.3,
)
model = GraniteForCausalLM(config).eval()
model.save_pretrained(folder)
wish = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False)
print(json.dumps([
    model.generate(torch.tensor([prompt]), **wish)[0, len(prompt):].tolist() for prompt in prompts
]))
"""


def test_tokens_equal_transformers(engine: VllmEngine, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "made")
    given = json.dumps([str(folder), PROMPTS, OUTPUT_TOKENS])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MAKE, given],
        check=True,
        capture_output=True,
        text=True,
    )
    expected = json.loads(done.stdout.splitlines()[-1])
    store = ModelStore(tmp_path / "store", as_is=served_architectures())
    stored = store.import_model(f"file://{folder}")
    assert stored.info.architecture == "granite"
    load(engine, stored.info, stored.path)
    wish = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    requests = [request(f"r{n}", prompt, wish) for n, prompt in enumerate(PROMPTS)]
    assert run(engine, *requests).tokens == {f"r{n}": e for n, e in enumerate(expected)}
    engine.unload(INSTANCE)
