"""Locust takes the options of `mesh replay`, and reads them by its rules."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.errors import InvalidInput, NotFound
from mesh.wire.certificates import Part, make_folder, read_tls
from mesh.wire.credentials import Credentials, credentials, show
from mesh_load.options import Options, add_options, read_options, show_credentials


class Parser(argparse.ArgumentParser):
    """Takes what locust's takes beside argparse's."""

    def add_argument(self, *names: Any, include_in_web_ui: bool = True, **more: Any) -> Any:
        assert names == ("-h", "--help") or not include_in_web_ui
        return super().add_argument(*names, **more)


def read(*words: str, host: str | None = None) -> Options:
    parser = Parser()
    add_options(parser)
    parsed = parser.parse_args(list(words))
    parsed.host = host
    return read_options(parsed)


def test_defaults_are_those_of_mesh_replay() -> None:
    found = read()
    assert (found.address, found.trace, found.report) == ("127.0.0.1:7070", None, None)
    assert (found.given["rate_scale"], found.given["clip"]) == (1.0, True)


def test_options_flags_and_a_file_of_options_are_taken(tmp_path: Path) -> None:
    config = tmp_path / "replay.toml"
    config.write_text("rate_scale = 0.5\nseed = 7\n")
    words = ("--trace", "t.csv", "--replay-config", str(config), "--seed", "0", "--no-clip")
    found = read(*words, "--map", "popularity", host="127.0.0.1:1234")
    assert (found.trace, found.address) == (Path("t.csv"), "127.0.0.1:1234")
    given = found.given
    assert (given["rate_scale"], given["seed"], given["clip"]) == (0.5, 0, False)
    assert given["how"] == "popularity"


def test_calls_go_by_openais_protocol_where_that_is_served(tmp_path: Path) -> None:
    assert read().http is None
    found = read("--http", "127.0.0.1:8070")
    assert (found.http, found.address) == ("127.0.0.1:8070", "127.0.0.1:7070")
    with pytest.raises(InvalidInput, match="nowhere"):
        read("--http", "nowhere")


def test_the_key_and_the_certificate_are_those_of_mesh(tmp_path: Path) -> None:
    parser = Parser()
    add_options(parser)
    make_folder(tmp_path / "tls", ("localhost",), 1)
    (tmp_path / "key").write_text("mesh_b\n")
    environ = {"MESH_KEY": "mesh_a", "MESH_TLS": str(tmp_path / "tls")}
    try:
        show_credentials(parser.parse_args([]), environ)
        assert credentials().key == "mesh_a"
        assert credentials().tls == read_tls(tmp_path / "tls", Part.CLIENT)
        show_credentials(parser.parse_args(["--key-file", str(tmp_path / "key")]), {})
        assert credentials() == Credentials(key="mesh_b")
    finally:
        show(Credentials())


def test_what_mesh_replay_would_not_take_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="time-scale"):
        read("--time-scale", "-1")
    with pytest.raises(InvalidInput, match="not-an-address"):
        read(host="not-an-address")
    with pytest.raises(NotFound):
        read("--replay-config", "nowhere.toml")


def test_locust_listens_on_the_loopback_alone() -> None:
    parser = Parser()
    add_options(parser)
    parsed = parser.parse_args([])
    assert (parsed.master_bind_host, parsed.web_host) == ("127.0.0.1", "127.0.0.1")
