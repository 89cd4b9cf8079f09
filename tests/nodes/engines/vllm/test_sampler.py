"""The logits processor draws what `sampling` draws, whatever vLLM does with the batch's rows."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from vllm import SamplingParams as VllmParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from mesh.domain.request import SamplingParams
from mesh.text.assets import read_assets
from mesh.text.grammars import choice_grammar
from mesh.text.tokenizer import TextCodec
from mesh_nodes.engines.sampling import Draw, Past, choose
from mesh_nodes.engines.vllm.sampler import EXTRA, MeshSampler, sample_order
from tests.nodes.engines.serving import request
from tests.support.tiny_model import write_tiny_llama

WORDS = 300
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=7, max_tokens=20)
PENALISED = SamplingParams(repetition_penalty=1.7, max_tokens=20)


def processor(model_path: Path = Path("no folder")) -> MeshSampler:
    model = SimpleNamespace(get_vocab_size=lambda: WORDS, model=str(model_path))
    return MeshSampler(SimpleNamespace(model_config=model), torch.device("cpu"), False)


def added(
    index: int, sampling: SamplingParams, outputs: list[int], given: tuple[int, ...] = ()
) -> tuple[int, VllmParams, list[int], list[int]]:
    order = sample_order(request(f"r{index}", [3, 4, 5], sampling, output=given))
    extra = None if order is None else {EXTRA: order}
    return index, VllmParams(temperature=0.0, extra_args=extra), [3, 4, 5], outputs


def update(**changes: object) -> BatchUpdate:
    return BatchUpdate(**{"batch_size": 4, "removed": (), "added": (), "moved": ()} | changes)


def logits(rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).normal(size=(rows, WORDS)).astype(np.float32))


def chosen(draws: MeshSampler, given: torch.Tensor) -> list[int]:
    tokens: list[int] = draws.apply(given.clone()).argmax(dim=-1).tolist()
    return tokens


def test_a_row_keeps_to_its_grammar_greedy_or_drawn(tmp_path: Path) -> None:
    """A token a character, so that the tokens of an answer are known."""
    folder = write_tiny_llama(tmp_path / "model")
    codec = TextCodec(read_assets(folder))
    end = codec.vocabulary_tokens - 1
    for sampling in (SamplingParams(max_tokens=20), SAMPLED):
        grammar = choice_grammar(["yes", "no"])
        asked = request("r0", [3], replace(sampling, grammar=grammar), stops=(end,))
        draws, outputs = processor(folder), list[int]()
        params = VllmParams(temperature=0.0, extra_args={EXTRA: sample_order(asked)})
        draws.update_state(update(added=[(0, params, [3], outputs)]))
        while end not in outputs:
            outputs += chosen(draws, logits(1))
        assert codec.decode(outputs[:-1]) in ("yes", "no")


def test_sampled_and_penalised_rows_are_drawn_and_greedy_ones_left() -> None:
    draws = processor()
    outputs: list[int] = []
    greedy = SamplingParams(max_tokens=20)
    draws.update_state(
        update(added=[added(0, SAMPLED, outputs), added(1, greedy, []), added(2, PENALISED, [])])
    )
    given = logits(3)
    past = Past([3, 4, 5], [], WORDS)
    penalised = choose(given[2:].clone().numpy(), [Draw(PENALISED, 0, 0, past)])
    for index in range(5):
        sampled = choose(given[:1].numpy(), [Draw(SAMPLED, 7, index, None)])
        assert chosen(draws, given) == [*sampled, int(given[1].argmax()), *penalised]
        outputs.append(9)


def test_a_resumed_request_goes_on_at_its_index_with_its_earlier_output_penalised() -> None:
    draws = processor()
    both = SamplingParams(
        temperature=0.8, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=1.5, seed=7
    )
    outputs = [40]
    draws.update_state(update(added=[added(0, both, outputs, given=(20, 21))]))
    past = Past([3, 4, 5], [20, 21, 40], WORDS)
    given = logits(1)
    assert chosen(draws, given) == choose(given.clone().numpy(), [Draw(both, 7, 3, past)])


def test_rows_follow_the_batch_when_they_move_swap_and_leave() -> None:
    draws = processor()
    seeds = {index: SamplingParams(temperature=5.0, seed=index) for index in range(3)}
    draws.update_state(update(added=[added(index, seeds[index], []) for index in range(3)]))
    given = logits(3)

    def expected(*order: int) -> list[int]:
        return choose(given[: len(order)].numpy(), [Draw(seeds[n], n, 0, None) for n in order])

    assert chosen(draws, given) == expected(0, 1, 2)
    draws.update_state(update(moved=[(0, 2, MoveDirectionality.SWAP)]))
    assert chosen(draws, given) == expected(2, 1, 0)
    draws.update_state(update(removed=[0], moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert chosen(draws, given[:2]) == expected(0, 1)
    draws.update_state(update(removed=[0, 1]))
    assert chosen(draws, given) == given.argmax(dim=-1).tolist()
