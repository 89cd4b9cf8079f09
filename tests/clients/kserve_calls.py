"""KServe's own client for Python, in a process and an environment of its own.

`python kserve_calls.py ADDRESS` writes what came of its calls.
"""

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest


def asked(*, raw: bool, model: str = "chat") -> InferRequest:
    tensor = InferInput("text_input", [1], "BYTES", [] if raw else ["hi"])
    if raw:
        tensor.set_data_from_numpy(np.array(["hi"], dtype=np.object_), binary_data=True)
    return InferRequest(model, [tensor], request_id="7", parameters={"max_tokens": 4})


async def main(address: str) -> None:
    found: dict[str, Any] = {}
    async with InferenceGRPCClient(address, retries=0) as client:
        found["server"] = [await client.is_server_live(), await client.is_server_ready()]
        found["models"] = [await client.is_model_ready(name) for name in ("chat", "chta")]
        for name in ("typed", "raw"):
            response = await client.infer(asked(raw=name == "raw"))
            (output,) = response.outputs
            (value,) = output.as_numpy()
            text = value.decode() if isinstance(value, bytes) else str(value)
            found[name] = [response.id, response.model_name, output.name, text]
        try:
            await client.infer(asked(raw=False, model="chta"))
        except Exception as error:
            found["missing"] = str(error)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
