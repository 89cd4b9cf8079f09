"""Triton's own client for Python, in a process of its own: its messages and mesh's have one name.

`python triton_calls.py ADDRESS CALL` makes one of the calls below and writes what came of it.
"""

import asyncio
import json
import queue
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

SAMPLING = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "4"}
"""As Triton's sample for vLLM has it: numbers as text, as a tensor and as parameters."""


def asked(prompt: str = "hi", *, stream: bool = False, model: str = "chat") -> dict[str, Any]:
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    flag = triton.InferInput("stream", [1], "BOOL")
    flag.set_data_from_numpy(np.array([stream], dtype=bool))
    sampling = triton.InferInput("sampling_parameters", [1], "BYTES")
    sampling.set_data_from_numpy(np.array([json.dumps(SAMPLING).encode()], dtype=np.object_))
    return {
        "model_name": model,
        "inputs": [text, flag, sampling],
        "outputs": [triton.InferRequestedOutput("text_output")],
        "request_id": "7",
        "parameters": SAMPLING,
    }


def told(result: Any) -> dict[str, Any]:
    response = result.get_response()
    return {
        "id": response.id,
        "text": result.as_numpy("text_output")[0].decode(),
        "final": response.parameters["triton_final_response"].bool_param,
    }


def about(client: Any) -> Any:
    metadata = client.get_model_metadata("chat", as_json=True)
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "models": [client.is_model_ready(name) for name in ("chat", "chta")],
        "server": client.get_server_metadata().name,
        "outputs": metadata["outputs"],
    }


def whole(client: Any) -> Any:
    return told(client.infer(**asked()))


def whole_by_callback(client: Any) -> Any:
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.async_infer(callback=lambda result, error: came.put((result, error)), **asked())
    result, error = came.get()
    assert error is None, error
    return told(result)


def streamed(client: Any) -> Any:
    """Three requests at once, of which one is of a model that is not there."""
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: came.put((result, error)))
    for one in (asked(stream=True), asked(), asked(model="chta")):
        client.async_stream_infer(enable_empty_final_response=True, **one)
    pieces: list[Any] = []
    failed: list[str] = []
    finals = 0
    while finals < 2 or not failed:
        result, error = came.get()
        if error is not None:
            failed.append(error.message())
            continue
        pieces.append(told(result))
        finals += pieces[-1]["final"]
    client.stop_stream()
    return {"pieces": pieces, "errors": failed}


def errors(client: Any) -> Any:
    found = []
    for one in (asked(model="chta"), asked("x" * 600), {**asked(), "inputs": []}):
        try:
            client.infer(**one)
        except InferenceServerException as error:
            found.append([error.status(), error.message()])
    return found


async def aio(address: str) -> Any:
    async with triton_aio.InferenceServerClient(address) as client:
        whole = told(await client.infer(**asked()))

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for _ in range(2):
                yield asked(stream=True)

        pieces = []
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            pieces.append(told(result))
        return {"whole": whole, "pieces": pieces}


def main(address: str, call: str) -> None:
    calls = {one.__name__: one for one in (about, whole, whole_by_callback, streamed, errors)}
    if call == aio.__name__:
        found = asyncio.run(aio(address))
    else:
        with triton.InferenceServerClient(address) as client:
            found = calls[call](client)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
