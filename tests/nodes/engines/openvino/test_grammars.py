"""Answers of the demo model keep to grammars, whatever is beside them and wherever they go on.

In the exact form, in which tokens do not depend on who else is computed.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from mesh.domain.grammar import Grammar, GrammarKind
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.model import KvPrecision, WeightPrecision
from mesh.domain.reasons import FinishReason
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest
from mesh.text.assets import read_assets
from mesh.text.grammars import choice_grammar, json_grammar
from mesh.text.tokenizer import TextCodec
from mesh_loader.store import StoredModel
from mesh_nodes.engines.grammars import constraint_of
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.contract.driving import Driver, Running, greedy
from tests.contract.engine_contract import StoredModel as ContractModel

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DRAWN = SamplingParams(max_tokens=120, temperature=1.0, grammar=json_grammar(SCHEMA))


def test_tokens_that_the_model_has_no_row_for_are_left_out_of_a_grammar(tmp_path: Path) -> None:
    """A tokenizer of 4 tokens beside a model of 3, whose configuration names an end beyond both."""
    vocabulary = {"a": 0, "b": 1, "</s>": 2, "ab": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    request = EngineRequest(
        request_id=RequestId("r"),
        attempt=1,
        prompt_tokens=(0,),
        output_tokens=(0,),
        sampling=SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, text="ab")),
        stop_token_ids=(2, 9),
    )
    constraint = constraint_of(request, tmp_path, 3)
    assert constraint is not None
    for token_id in (1, 2):
        row = np.zeros(3, np.float32)
        constraint.restrict(row)
        assert [n for n in range(3) if row[n] == 0] == [token_id]
        constraint.add([token_id])
    constraint.add([0])
    row = np.zeros(3, np.float32)
    constraint.restrict(row)
    assert constraint.failed
    assert row[2] == 0, "an answer that can go on no more ends"


class Model:
    """An instance of it, and its words."""

    def __init__(self, stored: StoredModel, engine: OpenVinoEngine) -> None:
        model = ContractModel(info=stored.info, path=stored.path)
        order = model.order(InstanceId("i-1"), kv_blocks=256, context_tokens_max=512, batch_max=8)
        self.codec = TextCodec(read_assets(stored.path))
        self.stop_ids = stored.info.stop_token_ids
        self.prompt = self.codec.encode("Describe a person as JSON: ")
        self.driver = Driver(engine, order)

    def submit(self, name: str, sampling: SamplingParams, output: tuple[int, ...] = ()) -> Running:
        return self.driver.submit(
            name, self.prompt, sampling, output=output, stop_ids=self.stop_ids
        )

    def text(self, running: Running, before: tuple[int, ...] = ()) -> str:
        return self.codec.decode([*before, *running.tokens])


@pytest.fixture(scope="module")
def model(smollm2_model: StoredModel) -> Iterator[Model]:
    engine = OpenVinoEngine(threads=1, weights=WeightPrecision.F16, kv=KvPrecision.F16)
    yield Model(smollm2_model, engine)
    engine.close()


def test_json_that_is_drawn_at_random_is_as_its_schema_says(model: Model) -> None:
    answers = [model.submit(f"r{seed}", replace(DRAWN, seed=seed)) for seed in range(3)]
    model.driver.finish()
    for answer in answers:
        assert answer.finish is FinishReason.STOP
        value = json.loads(model.text(answer))
        assert set(value) == {"name", "age", "tags"}
        assert 0 <= value["age"] <= 150
        assert set(value["tags"]) <= {"red", "green"}


def test_neighbours_get_the_tokens_that_they_get_alone(model: Model) -> None:
    alone = model.submit("alone", greedy(40))
    model.driver.finish()
    beside = model.submit("beside", greedy(40))
    model.submit("json", replace(DRAWN, seed=1))
    model.driver.finish()
    assert beside.tokens == alone.tokens


def test_a_request_that_comes_with_half_an_object_ends_it(model: Model) -> None:
    whole = model.submit("whole", replace(DRAWN, seed=3))
    model.driver.finish()
    half = tuple(whole.tokens[: len(whole.tokens) // 2])
    rest = model.submit("rest", replace(DRAWN, seed=3), output=half)
    model.driver.finish()
    assert [*half, *rest.tokens] == whole.tokens
    assert json.loads(model.text(rest, half))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (choice_grammar(["yes", "no"]), {"yes", "no"}),
        (Grammar(kind=GrammarKind.REGEX, text="[ab]{3}"), None),
        (Grammar(kind=GrammarKind.LARK, text='start: "<" /[0-9]/ ">"'), None),
    ],
    ids=["choice", "regex", "lark"],
)
def test_other_grammars_end_by_themselves_greedy_or_drawn(
    model: Model, grammar: Grammar, words: set[str] | None
) -> None:
    for n, sampling in enumerate(
        (SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=2.0, seed=5))
    ):
        answer = model.submit(f"{grammar.kind}-{n}", replace(sampling, grammar=grammar))
        model.driver.finish()
        text = model.text(answer)
        assert answer.finish is FinishReason.STOP
        assert words is None or text in words
        assert words is not None or len(text) == 3


def test_tokens_that_break_a_grammar_fail_that_request_alone(model: Model) -> None:
    beside = model.submit("fine", greedy(10))
    wrong = tuple(model.codec.encode_part("Hello"))
    broken = model.submit("broken", replace(DRAWN, seed=1), output=wrong)
    model.driver.finish()
    assert broken.finish is FinishReason.FAILED
    assert beside.finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    "text", ["a<|im_end|>b", "<|im_start|>system\n<|endoftext|>", "ü<|im_end|>"]
)
def test_the_name_of_a_special_token_in_a_grammar_is_text(model: Model, text: str) -> None:
    """It is written by tokens of text, and the answer does not end there."""
    for grammar, said in (
        (json_grammar({"const": text}), json.dumps(text, ensure_ascii=False)),
        (choice_grammar([text]), text),
    ):
        running = model.submit(text + grammar.kind, SamplingParams(max_tokens=60, grammar=grammar))
        model.driver.finish()
        assert running.finish is FinishReason.STOP
        assert model.text(running) == said
