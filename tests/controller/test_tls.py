"""TLS: both ends show certificates of one authority, and whatever is wrong with one is said."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from mesh.domain.errors import AlreadyExists, Forbidden, InvalidInput, Unavailable
from mesh.domain.ids import CellName
from mesh.domain.invocation import Finished
from mesh.front.cells import CellLink
from mesh.runtime.clock import LoopClock
from mesh.wire.certificates import Part, make_folder, read_tls
from mesh.wire.client import MeshClient
from mesh.wire.credentials import Credentials, Tls, show
from mesh.wire.link import NodeLink
from tests.controller.live import HELLO, SPEC, WAIT_S_MAX, FakeNode, LiveCell, asking, live_cell

HOSTS = ("localhost", "127.0.0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls")
    make_folder(made, HOSTS, 1)
    return made


def client_of(cell: LiveCell, tls: Tls | None) -> MeshClient:
    show(Credentials(tls=tls))
    return MeshClient(cell.address)


async def test_both_protocols_serve_those_who_trust(tmp_path: Path, folder: Path) -> None:
    tls = read_tls(folder, Part.CONTROLLER)
    async with live_cell(tmp_path, tls=tls, http="127.0.0.1:0") as cell:
        show(Credentials(tls=read_tls(folder, Part.NODE)))
        cell.nodes.append(await FakeNode(cell.address).join())
        client = client_of(cell, read_tls(folder, Part.CLIENT))
        assert (await cell.ask(client.deploy, SPEC)).message == "deployed"
        *_, last = await cell.ask(lambda: list(client.invoke(asking())))
        assert isinstance(last, Finished)

        def https(authority: Path) -> int:
            url = f"https://{cell.http}/healthz"
            return requests.get(url, verify=str(authority), timeout=WAIT_S_MAX).status_code

        assert await cell.ask(https, folder / "ca.pem") == 200
        make_folder(tmp_path / "other", HOSTS, 1)
        with pytest.raises(requests.exceptions.SSLError):
            await cell.ask(https, tmp_path / "other" / "ca.pem")


async def test_only_a_nodes_certificate_joins(tmp_path: Path, folder: Path) -> None:
    async with live_cell(tmp_path, tls=read_tls(folder, Part.CONTROLLER)) as cell:
        show(Credentials(tls=read_tls(folder, Part.CLIENT)))
        link = NodeLink(
            address=cell.address,
            hello=lambda: HELLO,
            rng=random.Random(1),
            on_open=lambda *_: None,
            on_command=lambda _: None,
            on_close=lambda _: None,
        )
        with pytest.raises(Forbidden, match="the certificate is of a mesh client"):
            await link.run()


async def said_of(cell: LiveCell, tls: Tls | None) -> str:
    client = client_of(cell, tls)
    with pytest.raises(Unavailable) as raised:
        await cell.ask(client.list)
    return raised.value.message


async def test_a_wrong_authority_name_or_date_is_said(tmp_path: Path, folder: Path) -> None:
    right = read_tls(folder, Part.CLIENT)
    make_folder(tmp_path / "other", HOSTS, 1)
    other = read_tls(tmp_path / "other", Part.CLIENT)
    async with live_cell(tmp_path / "a", tls=read_tls(folder, Part.CONTROLLER)) as cell:
        assert "certificate is not accepted" in await said_of(cell, other)
        # It trusts the controller, which does not trust it.
        stranger = replace(other, authority=right.authority)
        assert "it does not accept" in await said_of(cell, stranger)
        assert "speaks TLS, and no certificate was shown" in await said_of(cell, None)
    make_folder(tmp_path / "named", ("elsewhere.example",), 1)
    named = read_tls(tmp_path / "named", Part.CONTROLLER)
    async with live_cell(tmp_path / "b", tls=named) as cell:
        said = await said_of(cell, read_tls(tmp_path / "named", Part.CLIENT))
        assert "not valid for '127.0.0.1'" in said
    make_folder(tmp_path / "late", HOSTS, 0)
    late = tmp_path / "late"
    parts = {name: (late / f"{name}.pem").read_bytes() for name in ("ca", "controller", "client")}
    expired = replace(
        right,
        authority=parts["ca"],
        certificate=parts["controller"],
        key=(late / "controller.key").read_bytes(),
        folder=late,
        part="controller",
    )
    async with live_cell(tmp_path / "c", tls=expired) as cell:
        caller = replace(
            expired,
            certificate=parts["client"],
            key=(late / "client.key").read_bytes(),
            part="client",
        )
        assert "certificate has expired" in await said_of(cell, caller)


async def test_who_dials_a_cell_of_another_kind_is_told_which(tmp_path: Path, folder: Path) -> None:
    async with live_cell(tmp_path, http="127.0.0.1:0") as cell:
        assert "it does not speak TLS" in await said_of(cell, read_tls(folder, Part.CLIENT))
        assert cell.http is not None
        show(Credentials())
        lost = MeshClient(cell.http)
        with pytest.raises(Unavailable, match="serves HTTP") as raised:
            await cell.ask(lost.list)
        assert "--listen" in raised.value.hint
    tls = read_tls(folder, Part.CONTROLLER)
    async with live_cell(tmp_path / "secured", tls=tls, http="127.0.0.1:0") as cell:
        assert cell.http is not None
        show(Credentials(tls=read_tls(folder, Part.CLIENT)))
        with pytest.raises(Unavailable, match="serves HTTP"):
            await cell.ask(MeshClient(cell.http).list)
    with pytest.raises(Unavailable, match="no controller answers"):
        MeshClient("127.0.0.1:9").list()


async def test_a_front_says_why_a_cell_is_away(tmp_path: Path, folder: Path) -> None:
    async with live_cell(tmp_path, tls=read_tls(folder, Part.CONTROLLER)) as cell:
        show(Credentials())
        clock = LoopClock(asyncio.get_running_loop())
        link = CellLink(CellName("a"), [cell.address], clock, lambda _: None)
        watch = asyncio.create_task(link.watch())
        try:
            await cell.until(lambda: "speaks TLS" in _away(link))
        finally:
            watch.cancel()
            await link.close()


def _away(link: CellLink) -> str:
    try:
        link.channel()
    except Unavailable as error:
        return error.message
    return ""


def test_a_folder_is_checked_before_anybody_relies_on_it(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot read .*ca\.pem"):
        read_tls(tmp_path, Part.NODE)
    with pytest.raises(AlreadyExists):
        make_folder(folder, HOSTS, 1)
    with pytest.raises(InvalidInput, match="neither a name nor an address"):
        make_folder(tmp_path / "odd", ("ü",), 1)
    make_folder(tmp_path / "late", HOSTS, 0)
    with pytest.raises(InvalidInput, match="is valid from"):
        read_tls(tmp_path / "late", Part.CONTROLLER)
    make_folder(tmp_path / "mixed", HOSTS, 1)
    (tmp_path / "mixed" / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    with pytest.raises(InvalidInput, match="was not issued by"):
        read_tls(tmp_path / "mixed", Part.CLIENT)
    make_folder(tmp_path / "swapped", HOSTS, 1)
    (tmp_path / "swapped" / "node.key").write_bytes((folder / "node.key").read_bytes())
    with pytest.raises(InvalidInput, match="is not the key of"):
        read_tls(tmp_path / "swapped", Part.NODE)
    assert (folder / "ca.key").stat().st_mode & 0o077 == 0
