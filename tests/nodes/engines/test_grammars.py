"""A grammar that takes the compute thread's time ends its own answer, and no other's."""

from concurrent.futures import Future

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from mesh.domain.grammar import Grammar, GrammarKind
from mesh.text.grammars import compiled
from mesh_nodes.engines import grammars
from mesh_nodes.engines.grammars import Constraint

STOP = 255


def constraint(pattern: str) -> Constraint:
    grammar = compiled(Grammar(kind=GrammarKind.REGEX, text=pattern))
    matcher: Future[LLMatcher] = Future()
    matcher.set_result(LLMatcher(LLTokenizer("byte"), grammar, log_level=0))
    return Constraint(matcher, [STOP])


def allowed(constraint: Constraint) -> list[int]:
    row = np.zeros(262, np.float32)
    constraint.restrict(row)
    return list(np.flatnonzero(np.isfinite(row)))


def test_an_answer_whose_grammar_has_taken_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "CPU_S_MAX", 0.001)
    monkeypatch.setattr(grammars, "CPU_S_MAX_PER_TOKEN", 0.0)
    slow, quick = constraint("a{50000}"), constraint("a{5}")
    assert allowed(slow) == [ord("a")]
    slow.add([ord("a")])
    assert allowed(slow) == [STOP]
    assert slow.failed
    assert allowed(quick) == [ord("a")]
    assert not quick.failed


def test_a_matcher_that_is_never_built_ends_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "BUILD_S_MAX", 0.05)
    waiting = Constraint(Future(), [STOP])
    assert allowed(waiting) == [STOP]
    assert waiting.failed
