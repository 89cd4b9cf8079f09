"""Text around an engine: whole characters, stop strings, and the engine's own manners unchanged."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import EngineError, ModelError, TornModel
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.model import ModelInfo
from mesh.domain.profile import IterationShape
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens, SamplingParams
from mesh.runtime.engine import EngineRequest, LoadOrder
from mesh.text.assets import read_assets
from mesh.text.tokenizer import TextCodec
from mesh_nodes.text_engine import CODECS_MAX, TextEngine
from tests.contract.engine_contract import write_tiny_model
from tests.support.scripted_engine import ScriptedEngine, measured_s

INSTANCE = InstanceId("i-1")
PROMPT = tuple(range(40, 70))
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelInfo, Path]:
    path = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_model(path), path


def load_order(model: tuple[ModelInfo, Path], instance_id: str = INSTANCE) -> LoadOrder:
    return LoadOrder(
        instance_id=InstanceId(instance_id),
        deployment=DeploymentName("d"),
        model=model[0],
        model_path=model[1],
        kv_blocks=32,
        context_tokens_max=256,
        batch_max=4,
    )


@pytest.fixture
def engine(model: tuple[ModelInfo, Path]) -> TextEngine:
    engine = TextEngine(ScriptedEngine())
    engine.load(load_order(model), lambda phase, share: None)
    return engine


@pytest.fixture(scope="module")
def codec(model: tuple[ModelInfo, Path]) -> TextCodec:
    return TextCodec(read_assets(model[1]))


def submit(
    engine: TextEngine,
    name: str,
    *,
    stop: tuple[str, ...] = (),
    output: Iterable[int] = (),
    stop_ids: tuple[int, ...] = (),
    max_tokens: int = 60,
    min_tokens: int = 0,
    paused: bool = False,
) -> None:
    sampling = SamplingParams(
        max_tokens=max_tokens, min_tokens=min_tokens, stop=stop, ignore_eos=not stop_ids
    )
    request = EngineRequest(
        request_id=RequestId(name),
        prompt_tokens=PROMPT,
        output_tokens=tuple(output),
        sampling=sampling,
        stop_token_ids=stop_ids,
        paused=paused,
    )
    engine.submit(INSTANCE, request)


def run(engine: TextEngine) -> list[RequestTokens]:
    """The tokens of the one request that is running, from steps of one iteration."""
    tokens: list[RequestTokens] = []
    while not tokens or tokens[-1].finish is None:
        tokens += engine.step(INSTANCE, 64).outputs
    return tokens


def ids(tokens: Iterable[RequestTokens]) -> tuple[int, ...]:
    return tuple(token_id for token in tokens for token_id in token.token_ids)


def text(tokens: Iterable[RequestTokens]) -> str:
    return "".join(token.text for token in tokens)


def test_text_is_of_the_tokens_and_comes_with_them(engine: TextEngine, codec: TextCodec) -> None:
    """The scripted tokens are random bytes, so hardly any is a character of its own."""
    submit(engine, "r")
    tokens = run(engine)
    whole = codec.decode(ids(tokens))
    assert len(tokens) == 60
    assert text(tokens).rstrip(REPLACEMENT) == whole.rstrip(REPLACEMENT)
    assert any(token.text for token in tokens[:30])


def test_a_held_request_goes_on_with_the_text_where_its_tokens_left_it(engine: TextEngine) -> None:
    submit(engine, "whole")
    whole = run(engine)
    for sent in (2, 9, 30):
        submit(engine, "r", output=ids(whole[:sent]), paused=True)
        assert not engine.step(INSTANCE, 64).outputs
    submit(engine, "r", output=ids(whole[:33]))
    rest = run(engine)
    assert [(t.token_ids, t.text) for t in rest] == [(t.token_ids, t.text) for t in whole[33:]]


def test_a_request_that_pauses_is_not_fed_its_own_tokens_again(engine: TextEngine) -> None:
    """Its text would hold the stop string, if it came twice."""
    submit(engine, "free")
    free = run(engine)
    stop = (text(free[:9])[-1] + text(free)[:4],)
    assert stop[0] not in text(free)
    submit(engine, "r", stop=stop)
    before = [engine.step(INSTANCE, 64).outputs[0] for _ in range(9)]
    submit(engine, "r", stop=stop, output=ids(before), paused=True)
    assert not engine.step(INSTANCE, 64).outputs
    submit(engine, "r", stop=stop, output=ids(before))
    assert text(before) + text(run(engine)) == text(free)


def test_a_stop_string_ends_the_request_before_the_next_step(engine: TextEngine) -> None:
    submit(engine, "free")
    free = text(run(engine))
    stop = free[20:24]
    submit(engine, "r", stop=("never there", stop))
    tokens: list[RequestTokens] = []
    while True:
        result = engine.step(INSTANCE, 64)
        tokens += result.outputs
        if tokens[-1].finish is not None:
            break
    assert text(tokens) == free[: free.index(stop)]
    assert tokens[-1].finish is FinishReason.STOP
    assert len(tokens) < 60
    assert result.kv_blocks_used == 0, "the result knows that the blocks came free"
    assert engine.memory()[0].kv_blocks_used == 0
    assert engine.step(INSTANCE, 64).outputs == ()


def test_what_is_computed_after_a_stop_string_is_not_told(engine: TextEngine) -> None:
    submit(engine, "free")
    free = text(run(engine))
    submit(engine, "single", stop=(free[20:24],))
    single = run(engine)
    submit(engine, "r", stop=(free[20:24],))
    submit(engine, "other")
    engine.step(INSTANCE, 64)
    result = engine.step(INSTANCE, 64, len(single) + 9)
    stopped, other = result.outputs
    assert stopped.token_ids == ids(single[1:])
    assert stopped.text == text(single[1:])
    assert stopped.finish is FinishReason.STOP
    assert len(other.token_ids) == len(single) + 9
    assert engine.step(INSTANCE, 64).decode_batch == 1


def test_others_go_on_when_one_stops(engine: TextEngine) -> None:
    submit(engine, "free")
    free = run(engine)
    submit(engine, "other")
    submit(engine, "stopping", stop=(text(free)[10:13],))
    tokens: list[RequestTokens] = []
    while not any(token.request_id == "other" and token.finish for token in tokens):
        tokens += engine.step(INSTANCE, 64).outputs
    other = [token for token in tokens if token.request_id == "other"]
    assert ids(other) == ids(free)
    assert text(other) == text(free)


def test_text_that_might_begin_a_stop_string_comes_out_at_the_end(engine: TextEngine) -> None:
    submit(engine, "free")
    free = text(run(engine))
    submit(engine, "r", stop=(free[-3:] + "never",))
    tokens = run(engine)
    assert text(tokens) == free
    assert tokens[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_a_request_that_moves_goes_on_with_its_text(engine: TextEngine, cut: int) -> None:
    """Also in the middle of a character, and with the beginning of a stop string held back."""
    submit(engine, "free")
    free = text(run(engine))
    stop = (free[22:27],)
    submit(engine, "whole", stop=stop)
    whole = run(engine)
    cut = min(cut, len(whole) - 1)
    submit(engine, "moved", stop=stop, output=ids(whole[:cut]))
    moved = run(engine)
    assert [replace(output, request_id=RequestId("whole")) for output in moved] == whole[cut:]


@pytest.mark.parametrize("cut", [0, 7, 30])
def test_a_stop_string_counts_from_the_token_after_the_least(engine: TextEngine, cut: int) -> None:
    """In what was given out elsewhere, too."""
    submit(engine, "free")
    free = run(engine)
    whole, begins = text(free), len(text(free[:50]))
    stops = whole[4:6], whole[begins + 4 : begins + 6]
    submit(engine, "r", stop=stops, output=ids(free[:cut]), min_tokens=50)
    tokens = run(engine)
    ends = min(at for stop in stops if (at := whole.find(stop, begins)) >= 0)
    assert text(free[:cut]) + text(tokens) == whole[:ends]
    assert tokens[-1].finish is FinishReason.STOP


def test_a_stop_token_has_no_text(engine: TextEngine) -> None:
    submit(engine, "free")
    free = run(engine)
    stop_id = ids(free)[20]
    first = ids(free).index(stop_id)
    submit(engine, "r", stop_ids=(stop_id,))
    tokens = run(engine)
    assert ids(tokens) == ids(free[: first + 1])
    assert tokens[-1].finish is FinishReason.STOP
    assert text(tokens) == text(free[:first]) + tokens[-1].text
    assert tokens[-1].text.strip(REPLACEMENT) == "", "what was held back, no more"


def test_an_aborted_request_leaves_nothing(engine: TextEngine) -> None:
    submit(engine, "r")
    engine.step(INSTANCE, 64)
    engine.abort(INSTANCE, RequestId("r"))
    assert engine.step(INSTANCE, 64).outputs == ()
    submit(engine, "r")
    assert run(engine)[0].first_index == 0


def test_a_refused_request_leaves_the_one_of_its_name_alone(engine: TextEngine) -> None:
    submit(engine, "r")
    first = engine.step(INSTANCE, 64).outputs
    with pytest.raises(EngineError):
        submit(engine, "r")
    tokens = [*first, *run(engine)]
    submit(engine, "alone")
    assert text(tokens) == text(run(engine))


def test_a_model_without_a_tokenizer_is_not_loaded(model: tuple[ModelInfo, Path]) -> None:
    bare = model[1].parent / "bare"
    bare.mkdir()
    engine = TextEngine(ScriptedEngine())
    with pytest.raises(TornModel, match=r"tokenizer\.json"):
        engine.load(load_order((model[0], bare)), lambda phase, share: None)
    assert engine.memory() == ()


@pytest.mark.parametrize(("alike", "first_is_kept"), [(False, False), (True, True)])
def test_a_model_loaded_again_needs_no_new_codec_and_old_ones_go(
    model: tuple[ModelInfo, Path], tmp_path: Path, alike: bool, first_is_kept: bool
) -> None:
    """Unless newer ones have the same tokenizer: they share its codec."""
    engine = TextEngine(ScriptedEngine())

    def load_again(path: Path) -> bool:
        """Whether it loads with its tokenizer gone."""
        try:
            engine.load(load_order((model[0], path)), lambda phase, share: None)
        except TornModel:
            return False
        engine.unload(INSTANCE)
        return True

    paths = [tmp_path / str(n) for n in range(CODECS_MAX + 1)]
    for number, path in enumerate(paths):
        path.mkdir()
        shutil.copy(model[1] / "tokenizer.json", path)
        config = {"chat_template": f"of {number}", "bos_token": "<s>" if alike else f"<{number}>"}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_again(path)
        (path / "tokenizer.json").unlink()
    assert [load_again(path) for path in paths] == [first_is_kept] + [True] * CODECS_MAX


def test_a_request_whose_tokens_cannot_be_read_leaves_the_others_alone(engine: TextEngine) -> None:
    submit(engine, "unreadable", output=[40])
    engine.abort(INSTANCE, RequestId("unreadable"))
    with pytest.raises(ModelError, match="cannot decode tokens"):
        submit(engine, "unreadable", output=[-1])
    submit(engine, "other", max_tokens=2)
    assert {token.request_id for token in run(engine)} == {"other"}


def test_a_decoder_that_panics_ends_the_request_whose_tokens_it_cannot_decode(
    engine: TextEngine, model: tuple[ModelInfo, Path], codec: TextCodec, tmp_path: Path
) -> None:
    """Stripping one letter from either side of a text that has but that one: a Rust slice ends
    before it begins, which raises what is no Exception.
    """
    submit(engine, "free")
    free = ids(run(engine))
    fatal = next(n for n, token in enumerate(free) if n > 2 and token not in PROMPT[-10:])
    parts = json.loads((model[1] / "tokenizer.json").read_bytes())
    letter = next(
        piece for piece, number in parts["model"]["vocab"].items() if number == free[fatal]
    )
    parts["decoder"] = {"type": "Strip", "content": letter, "start": 1, "stop": 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    other = TextEngine(ScriptedEngine())
    other.load(load_order((model[0], tmp_path)), lambda phase, share: None)
    submit(other, "bad")
    tokens = run(other)
    assert tokens[-1].finish is FinishReason.FAILED
    assert len(tokens) <= fatal + 1
    submit(other, "good", max_tokens=2)
    assert [token.finish for token in run(other)] == [None, FinishReason.LENGTH]


def test_a_request_for_an_instance_that_is_not_loaded_is_refused(engine: TextEngine) -> None:
    engine.unload(INSTANCE)
    with pytest.raises(EngineError, match="not loaded"):
        submit(engine, "r")


def test_a_stop_string_that_comes_with_the_last_token_is_why_it_ends(engine: TextEngine) -> None:
    submit(engine, "free", max_tokens=12)
    free = run(engine)
    last = next(token.text for token in reversed(free) if token.text)
    length = max(token.first_index for token in free if token.text) + 1
    submit(engine, "r", max_tokens=length, stop=(last,))
    tokens = run(engine)
    assert tokens[-1].finish is FinishReason.STOP
    assert last not in "".join(token.text for token in tokens)


def test_a_moved_request_that_has_its_stop_string_ends_so(engine: TextEngine) -> None:
    submit(engine, "free")
    free = run(engine)
    stop = "".join(token.text for token in free)[3:6]
    submit(engine, "r", stop=(stop,), output=ids(free[:40]))
    (token,) = run(engine)
    assert (token.first_index, token.text, token.finish) == (40, "", FinishReason.STOP)


def test_a_measure_is_the_inner_engines(engine: TextEngine) -> None:
    shape = IterationShape(decode_batch=2, decode_context_tokens=100)
    assert engine.measure(INSTANCE, shape) == measured_s(shape, 0.0)
