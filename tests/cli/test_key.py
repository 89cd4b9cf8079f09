"""`mesh key` on the controller's machine, and the key that every verb shows."""

import json
from pathlib import Path

import pytest

from mesh.wire.certificates import Part, read_tls
from mesh.wire.credentials import Credentials
from tests.cli.conftest import RunningCell, running_cell
from tests.cli.running import Ran, mesh
from tests.support.tiny_model import write_tiny_llama


def key(home: Path, *arguments: str) -> Ran:
    return mesh("key", *arguments, environ={"MESH_HOME": str(home)})


def test_keys_are_made_listed_revoked_and_limited(tmp_path: Path) -> None:
    made = key(tmp_path, "create", "--tenant", "acme", "--expires", "30d")
    assert made.code == 0, made.err
    assert made.out.startswith("mesh_")
    (kept,) = json.loads(key(tmp_path, "list", "-o", "json").out)
    assert (kept["tenant"], kept["role"], kept["revoked_unix_s"]) == ("acme", "tenant", None)
    assert kept["expires_unix_s"] - kept["created_unix_s"] == pytest.approx(30 * 24 * 3600, abs=5)
    assert made.out.strip() not in json.dumps(kept), "it is shown once"
    assert key(tmp_path, "revoke", kept["key_id"]).err == f"{kept['key_id']}: revoked\n"
    header, row = key(tmp_path, "list").out.splitlines()
    assert header.split() == ["KEY", "ROLE", "TENANT", "STATE", "CREATED", "EXPIRES"]
    assert row.split()[:4] == [kept["key_id"], "tenant", "acme", "revoked"]
    assert key(tmp_path, "limit", "acme", "--requests-per-s", "5", "--running", "2").code == 0
    _, limits = key(tmp_path, "limits").out.splitlines()
    assert limits.split() == ["acme", "5", "-", "2", "-"]
    assert key(tmp_path, "revoke", "nobody's").code == 1
    assert key(tmp_path, "create").code == 2, "the role tenant needs one"
    assert key(tmp_path, "create", "--tenant", "acme", "--expires", "soon").code == 2


def test_verbs_show_the_key_of_the_environment_or_of_a_file(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny")
    admin = key(tmp_path, "create", "--role", "admin").out.strip()
    tenant = key(tmp_path, "create", "--tenant", "acme").out.strip()
    node = tmp_path / "node.key"
    node.write_text(key(tmp_path, "create", "--role", "node").out)
    shown, options = Credentials(key=admin), ("--key-file", str(node))
    with running_cell(
        tmp_path, "--keys", "--sources", "tenant=file", node_options=options, shown=shown
    ) as cell:

        def ask(with_key: str, *arguments: str, stdin: bytes = b"") -> Ran:
            environ = {"MESH_CONTROLLER": cell.address, "MESH_KEY": with_key}
            return mesh(*arguments, stdin=stdin, environ=environ)

        assert ask("", "get").error_lines[0] == "no key was given"
        assert ask("mesh_none", "get").error_lines[0] == "the key is unknown"
        assert ask("not a key", "get").code == 2
        assert ask(tenant, "deploy", "-", stdin=cell.manifest("mine")).code == 0
        assert ask(tenant, "invoke", "mine", "hello", "--max-tokens", "2").code == 0
        assert "tenant" in ask(tenant, "nodes").error_lines[0]
        file = tmp_path / "admin.key"
        file.write_text(f"{admin}\n")
        ran = ask(tenant, "--key-file", str(file), "usage", "--by", "tenant", "-o", "json")
        (used,) = json.loads(ran.out)
        assert (used["tenant"], used["output_tokens"]) == ("acme", 2)
        assert ask("", "--key-file", str(tmp_path / "none"), "get").code == 2


def test_a_cell_with_certificates_is_reached_with_those_of_its_folder(tmp_path: Path) -> None:
    folder, other = tmp_path / "tls", tmp_path / "other"
    assert mesh("tls", "init", str(folder)).code == 0
    assert mesh("tls", "init", str(folder)).error_lines[0].endswith("has an authority already")
    assert mesh("tls", "init", str(other)).code == 0
    options = ("--tls", str(folder))
    shown = Credentials(tls=read_tls(folder, Part.CLIENT))
    with running_cell(tmp_path, *options, node_options=options, shown=shown) as cell:
        assert mesh("nodes", environ={"MESH_CONTROLLER": cell.address}).code == 1
        at = ("--controller", cell.address)
        assert "cpu0" in mesh("--tls", str(folder), "nodes", *at).out
        told = mesh("nodes", *at, environ={"MESH_TLS": str(other)})
        assert "certificate is not accepted" in told.error_lines[0]


def test_the_shared_cell_needs_none(cell: RunningCell) -> None:
    assert cell.mesh("get").code == 0
