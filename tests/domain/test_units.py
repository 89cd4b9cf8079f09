"""Byte sizes, source rules, refusal hints and the transition tables."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.access import Role
from mesh.domain.errors import Forbidden, InvalidInput, Refused
from mesh.domain.lifecycle import INSTANCE, TABLES, InstanceState, MigrationState, advance
from mesh.domain.reasons import RefusalReason, hint_for
from mesh.domain.source_rules import SourceRules, names_host, read_source_rules
from mesh.domain.units import format_bytes, parse_bytes
from scripts.gen_lifecycle import TARGET, page


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5kib", 1536), ("2GB", 2 * 10**9), ("77", 77)],
)
def test_sizes_parse_with_either_base(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


def test_a_size_may_have_any_number_of_digits() -> None:
    assert parse_bytes("9" * 400) > 10**399


@given(st.text())
def test_other_text_is_invalid_input_and_nothing_else(text: str) -> None:
    with contextlib.suppress(InvalidInput):
        assert parse_bytes(text) >= 0


@given(st.integers(0, 1 << 50))
def test_formatted_sizes_are_right_within_their_digits(size_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= max(0.06 * size_bytes, 1)


TENANT, ADMIN = Role.TENANT, Role.ADMIN


@pytest.mark.parametrize("scheme", ["pkg", "hf", "https", "http", "s3"])
def test_a_tenant_may_use_all_but_the_files_of_nodes(scheme: str) -> None:
    SourceRules().check(TENANT, f"{scheme}://host/m.gguf")


def test_an_operator_may_use_all_and_a_tenant_no_file() -> None:
    SourceRules().check(ADMIN, "file:///models/m.gguf")
    with pytest.raises(Forbidden, match="file://") as caught:
        SourceRules().check(TENANT, "file:///models/m.gguf")
    assert "--sources tenant=" in caught.value.hint


@pytest.mark.parametrize(
    ("rules", "source", "allowed"),
    [
        ("tenant=hf", "hf://org/name", True),
        ("tenant=hf", "https://huggingface.co/m.gguf", False),
        ("tenant=hf://org", "hf://org/name@main", True),
        ("tenant=hf://org/name", "hf://org/name@v2", True),
        ("tenant=hf://org", "hf://organisation/name", False),
        ("tenant=https://models.example", "https://models.example/m.gguf", True),
        ("tenant=https://models.example", "https://MODELS.example:8443/m.gguf", True),
        ("tenant=https://models.example:443", "https://models.example:8443/m.gguf", False),
        ("tenant=https://models.example", "http://models.example/m.gguf", False),
        ("tenant=https://models.example", "https://models.example.evil/m.gguf", False),
        ("tenant=https://models.example", "https://evil/?https://models.example/m.gguf", False),
        ("tenant=https://models.example", "https://evil#@models.example/m.gguf", False),
        ("tenant=http://10.0.0.0/8", "http://10.1.2.3/m.gguf", True),
        ("tenant=http://10.0.0.0/8", "http://11.1.2.3/m.gguf", False),
        ("tenant=s3://bucket/shared", "s3://bucket/shared/m.gguf", True),
        ("tenant=s3://bucket/shared", "s3://bucket/shared-not/m.gguf", False),
        ("tenant=file:///srv/models", "file:///srv/models/m.gguf", True),
        ("tenant=file:///srv/models", "file://localhost/srv/models/m.gguf", True),
        ("tenant=file:///srv/models", "file:///srv/models-of-others/m.gguf", False),
        ("tenant=file:///srv/models", "file:///srv/models/../../etc/m.gguf", False),
        ("tenant=file:///srv/models", "file:///srv/models/link/../m.gguf", False),
        ("tenant=file:///srv/models", "file:///srv/models/link/%2e%2e/m.gguf", False),
        ("tenant=file:///srv/models", "file:///srv/models/a..b/m.gguf", True),
        ("tenant=file:///srv/models", "file:///srv/models/%2e%2e/%2e%2e/etc/m.gguf", False),
        ("tenant=pkg,hf", "s3://bucket/m.gguf", False),
        ("tenant=all", "file:///models/m.gguf", True),
        ("tenant=", "pkg://package/m.gguf", False),
        ("admin=pkg", "pkg://package/m.gguf", True),
    ],
)
def test_what_a_rule_allows(rules: str, source: str, allowed: bool) -> None:
    role = Role(rules.partition("=")[0])
    found = read_source_rules([rules])
    if allowed:
        found.check(role, source)
    else:
        with pytest.raises(Forbidden):
            found.check(role, source)


def test_rules_of_one_role_count_together_and_name_hosts() -> None:
    rules = read_source_rules(
        ["admin=all,http://Models.Internal:8000", "admin=https://10.0.0.0/8", "tenant=hf"]
    )
    assert rules.named_hosts() == ("10.0.0.0/8", "models.internal:8000")
    assert names_host(rules.named_hosts(), "models.internal", 8000)
    assert not names_host(rules.named_hosts(), "models.internal", 80)
    assert names_host(rules.named_hosts(), "10.2.3.4", 443)
    assert not names_host(rules.named_hosts(), "evil.example", 443)


@pytest.mark.parametrize(
    "text", ["tenant", "node=pkg", "tenant=ftp", "tenant=http://a@b", "tenant=http://", "=pkg"]
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--sources"):
        read_source_rules([text])


@pytest.mark.parametrize("reason", RefusalReason)
def test_every_reason_has_a_remedy_and_a_retry_where_it_helps(reason: RefusalReason) -> None:
    remedy = hint_for(reason)
    assert remedy
    assert "try again in" not in remedy
    retried = f"try again in 2.5 s; {remedy}"
    if reason is RefusalReason.LOAD_FAILED:
        retried = f"{remedy}; mesh loads it again in 2.5 s"
    assert hint_for(reason, 2.5) == retried
    assert Refused("x", reason=reason).hint == remedy
    assert Refused("x", reason=reason, hint="y").hint == "y"


@pytest.mark.parametrize(
    ("reason", "what"),
    [
        (RefusalReason.MEMORY_FULL, "memory"),
        (RefusalReason.TPOT_EXCEEDED, "spec.slo.tpot_s"),
        (RefusalReason.FIRST_TOKEN_LATE, "spec.slo.ttft_s"),
        (RefusalReason.PROMPT_TOO_LONG, "shorten the prompt"),
        (RefusalReason.LOAD_FAILED, "mesh logs"),
        (RefusalReason.LOAD_FAILED, "spec.context_tokens_max"),
        (RefusalReason.NO_NODE, "mesh node"),
    ],
)
def test_the_remedy_is_for_what_lacked(reason: RefusalReason, what: str) -> None:
    assert what in hint_for(reason)


def test_the_documented_diagrams_are_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == page(), "run python scripts/gen_lifecycle.py"


def test_every_state_can_be_reached_and_every_target_is_a_state() -> None:
    for table in TABLES.values():
        states = list(table)
        reached = {states[0], *{MigrationState.FETCHING}.intersection(states)}
        for _ in states:
            reached |= {to for state in reached for to in table[state]}
        assert reached == set(states)


def test_a_transition_that_is_not_in_the_table_fails_where_it_is_made() -> None:
    assert advance(INSTANCE, InstanceState.LOADING, InstanceState.READY) is InstanceState.READY
    with pytest.raises(ValueError, match="from gone to ready"):
        advance(INSTANCE, InstanceState.GONE, InstanceState.READY)
