"""`source_rules`: which sources the callers of a role may deploy from."""

import pytest

from mesh.domain.access import Role
from mesh.domain.errors import Forbidden, InvalidInput
from mesh.domain.source_rules import SourceRules, names_host, read_source_rules

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
