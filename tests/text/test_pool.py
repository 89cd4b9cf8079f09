"""Who is served when, of several tenants; and what a child process is given."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from mesh.domain.errors import InvalidInput, MeshError
from mesh.domain.text import ChatMessage, TextAssets
from mesh.text import pool as pools
from mesh.text.pool import Owner, TextPool, codec_key
from tests.text.conftest import tiny_assets

BUSY = "{% for i in range(2000) %}{% for j in range(300) %}{% endfor %}{% endfor %}{{ messages }}"
"""Takes some tens of milliseconds."""


@pytest.fixture
async def pool() -> AsyncIterator[TextPool]:
    pool = TextPool()
    yield pool
    await pool.close()


def model(name: str, template: str = "{{ messages[0].content }}") -> TextAssets:
    return replace(tiny_assets(), chat_template=template + name)


async def called(pool: TextPool, tenant: str, assets: TextAssets, text: str = "hi") -> Any:
    owner = Owner(tenant=tenant, name="m", key=codec_key(assets))
    asked = ((ChatMessage(role="user", content=text),), "", "")
    return await pool.call(owner, lambda: assets, "encode_chat", *asked, chars=len(text))


async def test_a_tenant_with_many_calls_leaves_a_process_to_the_others(pool: TextPool) -> None:
    """And their calls go before those of its own that wait."""
    order: list[str] = []

    async def call(tenant: str, number: int, template: str) -> None:
        await called(pool, tenant, model(str(number), template))
        order.append(tenant)

    greedy = [asyncio.create_task(call("greedy", n, BUSY)) for n in range(8)]
    await asyncio.sleep(0)
    modest = asyncio.create_task(call("modest", 0, "{{ messages[0].content }}"))
    await asyncio.sleep(0)
    serving = [place.job.owner.tenant for place in pool._places if place.job]
    assert sorted(serving) == ["greedy", "modest"]
    await asyncio.gather(*greedy, modest)
    assert order.index("modest") <= 3


async def test_a_call_that_is_left_waits_no_longer(pool: TextPool) -> None:
    assets = model("", BUSY)
    first, second = (asyncio.create_task(called(pool, "", assets)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert pool._waiting == []
    assert len(await first) > 0


async def test_a_child_that_the_system_kills_is_replaced(pool: TextPool) -> None:
    assets = model("")
    expected = await called(pool, "", assets)
    (child,) = [place.running for place in pool._places if place.running]
    os.kill(child.process.pid, 9)
    await child.process.wait()
    assert await called(pool, "", assets) == expected


async def test_slow_models_are_apart(pool: TextPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SLOW_SHARE", 0.0)
    assets = model("", BUSY)
    for kinds in (["text"], ["apart", "text"]):
        await called(pool, "", assets)
        assert sorted(place.kind for place in pool._places if place.running) == kinds


async def test_a_child_sees_no_key_and_cannot_write(
    pool: TextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_KEY", "secret")
    await called(pool, "", model(""))
    (child,) = [place.running for place in pool._places if place.running]
    process = psutil.Process(child.process.pid)
    assert "secret" not in process.environ().values()
    assert process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)


async def test_a_pool_that_is_closed_refuses_and_leaves_no_process(pool: TextPool) -> None:
    await called(pool, "", model(""))
    (child,) = [place.running for place in pool._places if place.running]
    left = asyncio.create_task(called(pool, "", model("", BUSY)))
    await asyncio.sleep(0.01)
    await pool.close()
    assert child.process.returncode == -9
    for call in (left, asyncio.create_task(called(pool, "", model("")))):
        with pytest.raises(MeshError, match="stopping"):
            await call


async def test_text_beyond_the_memory_limit_is_the_callers_error(pool: TextPool) -> None:
    bad = model("", "{{ messages[0].content * 1000000000 }}")
    with pytest.raises(InvalidInput, match="MiB of further memory, which is the limit"):
        await called(pool, "", bad)
    assert len(await called(pool, "", model(""))) > 0
