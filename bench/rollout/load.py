"""Callers of one deployment, each of whom asks again as soon as it has its answer."""

import threading
import time

from mesh.domain.errors import Cancelled, MeshError
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Finished, Invocation, TextPrompt
from mesh.wire.client import MeshClient

POLL_S = 0.02


class Load:
    """A context: they stop when it is left."""

    def __init__(
        self, client: MeshClient, name: DeploymentName, *, callers: int, tokens: int
    ) -> None:
        self.finished = 0
        self.failed: list[MeshError] = []
        self._client = client
        self._asked = Invocation(
            deployment=name,
            prompt=TextPrompt(text="through it all"),
            max_tokens=tokens,
            ignore_eos=True,
        )
        self._tokens = tokens
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call) for _ in range(callers)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        while not self._stop.is_set():
            try:
                *_, last = self._client.invoke(self._asked)
                if not isinstance(last, Finished) or last.output_tokens != self._tokens:
                    raise MeshError(f"an answer ended as {last}")
            except MeshError as error:
                with self._lock:
                    self.failed.append(error)
            else:
                with self._lock:
                    self.finished += 1

    def until(self, finished: int, *, wait_s_max: float) -> None:
        """Wait until so many have their answers, or one has failed. Raises Cancelled."""
        until_s = time.monotonic() + wait_s_max
        while self.finished < finished and not self.failed:
            if time.monotonic() > until_s:
                raise Cancelled(f"{self.finished} of {finished} answers in {wait_s_max:.0f} s")
            time.sleep(POLL_S)
