"""Answers of the demo model by 200 JSON schemas, drawn at temperature 1, on the engine itself.

Half of the schemas are real ones, of which those that cannot be kept to are told by name. Every
answer that ended by itself is validated by `jsonschema`: `valid_share` is of those. What a mask
takes (`mask_added_ms`, the median) is measured with the answers' own tokens; what it costs who is
computed beside it (`neighbours_added_share`) as the iterations of a batch of which half is
structured over those of one of which nobody is, in turns. The last line is one JSON object.
"""

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from statistics import median
from typing import Any

import jsonschema
import numpy as np

from bench.demo_model import stored_model
from bench.driving import INSTANCE, LoadedModel
from bench.harness import Report, Table, show_status
from mesh.domain.errors import InvalidInput
from mesh.domain.grammar import Grammar
from mesh.domain.ids import RequestId
from mesh.domain.reasons import FinishReason
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest
from mesh.text.assets import read_assets
from mesh.text.grammars import check_grammar, json_grammar
from mesh.text.tokenizer import TextCodec
from mesh_loader.store import StoredModel
from mesh_nodes.engines.grammars import constraint_of
from mesh_nodes.engines.openvino.engine import OpenVinoEngine

Schema = Mapping[str, Any]
_WORDS = ("name", "city", "count", "price", "tags", "owner", "state", "size", "date", "active")


def shipped(count: int, seed: int) -> list[tuple[str, Schema]]:
    """With the name of each; drawn from all."""
    found = list(_shipped())
    return random.Random(seed).sample(found, min(count, len(found)))


def _shipped() -> Iterator[tuple[str, Schema]]:
    folder = files("check_jsonschema") / "builtin_schemas" / "vendor"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".json"):
            continue
        whole = json.loads(file.read_text(encoding="utf-8"))
        yield file.name, whole
        for keyword in ("definitions", "$defs"):
            for name in whole.get(keyword, {}):
                part = {"$ref": f"#/{keyword}/{name}", keyword: whole[keyword]}
                yield f"{file.name}#{name}", part


def made_up(count: int, seed: int) -> list[tuple[str, Schema]]:
    rng = random.Random(seed)
    return [(f"made up {n}", _object(rng, depth=2)) for n in range(count)]


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": names[: rng.randint(1, len(names))],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> Schema:
    kinds: list[Schema] = [
        {"type": "string", "maxLength": rng.randint(4, 24)},
        {"type": "integer", "minimum": 0, "maximum": 10 ** rng.randint(1, 6)},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"][: rng.randint(1, 3)]},
        {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{2,8}$"}]},
        {"type": "array", "items": {"type": "integer"}, "maxItems": rng.randint(1, 4)},
    ]
    if depth > 0:
        kinds.append(_object(rng, depth))
    return rng.choice(kinds)


SCHEMAS = 200
BATCH = 8
TOKENS_MAX = 256
ROUNDS = 6
ROUND_TOKENS = 48
CONTEXT_TOKENS = 1024
DRAWN = SamplingParams(max_tokens=TOKENS_MAX, temperature=1.0)


@dataclass(slots=True)
class Answer:
    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


class Model(LoadedModel):
    def __init__(self, stored: StoredModel) -> None:
        super().__init__(
            OpenVinoEngine(),
            stored,
            kv_tokens=BATCH * CONTEXT_TOKENS * 2,
            context_tokens_max=CONTEXT_TOKENS,
            batch_max=BATCH,
        )
        self.info, self.path = stored.info, stored.path
        self.codec = TextCodec(read_assets(stored.path))

    def request(self, name: str, prompt: str, sampling: SamplingParams) -> EngineRequest:
        return EngineRequest(
            request_id=RequestId(name),
            prompt_tokens=self.codec.encode(prompt),
            output_tokens=(),
            sampling=sampling,
            stop_token_ids=self.info.stop_token_ids,
        )

    def answers(self, requests: Sequence[EngineRequest]) -> tuple[list[Answer], list[float]]:
        """The answers to all of them at once, and the seconds of each iteration."""
        by_id = {request.request_id: Answer(request) for request in requests}
        for request in requests:
            self.engine.submit(INSTANCE, request)
        seconds = []
        while any(answer.finish is None for answer in by_id.values()):
            began_s = time.perf_counter()
            result = self.step(CONTEXT_TOKENS)
            seconds.append(time.perf_counter() - began_s)
            for output in result.outputs:
                answer = by_id[output.request_id]
                answer.tokens += output.token_ids
                answer.finish = output.finish
        return list(by_id.values()), seconds


def wanted() -> tuple[list[tuple[str, Schema, Grammar]], list[str]]:
    """Schemas that can be kept to, and why others cannot."""
    kept, refused = [], []
    for name, schema in (*shipped(SCHEMAS // 2, 1), *made_up(SCHEMAS // 2, 2)):
        try:
            grammar = json_grammar(dict(schema))
            check_grammar(grammar)
        except InvalidInput as error:
            refused.append(f"{name}: {error.message}")
        else:
            kept.append((name, schema, grammar))
    return kept, refused


def valid(schema: Schema, text: str) -> bool:
    try:
        jsonschema.validators.validator_for(schema)(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def mask_ms(model: Model, answer: Answer) -> list[float]:
    """The time of each token of an answer, without the building of its matcher."""
    constraint = constraint_of(answer.request, model.path, model.info.vocabulary_tokens)
    assert constraint is not None
    row = np.zeros(model.info.vocabulary_tokens, np.float32)
    constraint.restrict(row)
    taken = []
    for token_id in answer.tokens[:-1]:
        constraint.add((token_id,))
        began_s = time.perf_counter()
        constraint.restrict(row)
        taken.append((time.perf_counter() - began_s) * 1000)
    return taken


def iteration_s(model: Model, grammars: Sequence[Grammar | None], turn: int) -> float:
    """The median of a batch, half of which keeps to these."""
    free = replace(DRAWN, max_tokens=ROUND_TOKENS, ignore_eos=True)
    requests = [
        model.request(
            f"{turn}-{n}",
            "Write a long list of words: ",
            free if grammar is None else replace(free, grammar=grammar, seed=n),
        )
        for n, grammar in enumerate((*grammars, *[None] * (BATCH - len(grammars))))
    ]
    _, seconds = model.answers(requests)
    return median(seconds[1:])


def neighbours_added_share(model: Model) -> float:
    """How much longer neighbours decode beside answers of a list of numbers that never ends, so
    that the batch stays as large as it is.
    """
    endless = json_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 4096})
    shares = []
    for turn in range(ROUNDS):
        without_s = iteration_s(model, [None] * (BATCH // 2), 2 * turn)
        with_s = iteration_s(model, [endless] * (BATCH // 2), 2 * turn + 1)
        shares.append(with_s / without_s - 1.0)
    return median(shares)


@dataclass(slots=True)
class _Found:
    ended: int = 0
    """Answers that `max_tokens` did not cut off."""
    wrong: list[str] = field(default_factory=list)
    masks_ms: list[float] = field(default_factory=list)

    def answer(self, model: Model, some: Sequence[tuple[str, Schema, Grammar]], first: int) -> None:
        requests = [
            model.request(f"s{n}", "Answer with JSON: ", replace(DRAWN, grammar=grammar, seed=n))
            for n, (_, _, grammar) in enumerate(some, first)
        ]
        answers, _ = model.answers(requests)
        for (name, schema, _), answer in zip(some, answers, strict=True):
            self.masks_ms += mask_ms(model, answer)
            if answer.finish is FinishReason.STOP:
                self.ended += 1
                if not valid(schema, model.codec.decode(answer.tokens)):
                    self.wrong.append(name)


def run() -> Report:
    kept, refused = wanted()
    model = Model(stored_model())
    found = _Found()
    for first in range(0, len(kept), BATCH):
        show_status(f"schema {first} of {len(kept)}")
        found.answer(model, kept[first : first + BATCH], first)
    show_status("neighbours")
    added_share = neighbours_added_share(model)
    model.close()
    counts = {
        "refused by name": len(refused),
        "answered": len(kept),
        "ended by themselves": found.ended,
        "valid": found.ended - len(found.wrong),
    }
    wrong = (f"not valid: {name}" for name in found.wrong)
    return Report(
        figures={
            "schemas": len(kept) + len(refused),
            "refused": len(refused),
            "finished": found.ended,
            "valid_share": round(1.0 - len(found.wrong) / max(found.ended, 1), 4),
            "mask_added_ms": round(median(found.masks_ms), 4),
            "mask_ms_p99": round(sorted(found.masks_ms)[int(0.99 * len(found.masks_ms))], 3),
            "neighbours_added_share": round(added_share, 4),
        },
        shown=(
            Table(headings=("", "schemas"), rows=[(k, str(n)) for k, n in counts.items()]),
            *(line[:160] for line in (*refused, *wrong)),
        ),
    )
