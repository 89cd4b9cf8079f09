"""A model's weights on their way between the device and host memory.

Parameters stand in a range of the node's pool, which this process fills, or finds filled by one
that had the same model; they never change, so a sleep copies none of them, and a wake and a first
load from the pool are the same copy. Buffers, which are small and may change, have a copy of this
process's own. What a tensor is a view of is its storage: emptied and filled again, it leaves every
tensor valid. Before: `instance`, which sleeps and wakes. After: `pooled`, `weights_memory`, torch.
"""

import logging
import threading
from bisect import bisect_right
from contextlib import nullcontext

import torch

from mesh.domain.errors import EngineError, OutOfMemory
from mesh_nodes.engines.vllm.messages import Layout, Range
from mesh_nodes.engines.vllm.pooled import PooledMemory
from mesh_nodes.engines.vllm.weights_memory import TorchMemory, WeightsMemory, as_bytes, by_storage

log = logging.getLogger(__name__)

Beside = tuple[tuple[str, str], ...]


class Weights:
    """The weights of one model on one device, including its buffers. Storages that tensors share
    count once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        pooled: PooledMemory | None = None,
        beside: Beside = (),
        memory: WeightsMemory | None = None,
    ) -> None:
        """`pooled`: where they can sleep. `beside`: see `Layout`. `memory`: what lies under them on
        the device, unless it is torch's own.
        """
        self._model = model
        self._device = device
        self._pooled = pooled
        self._beside = beside
        self._memory = memory or TorchMemory(device)
        self._where: Range | None = None
        self._filled = False
        self._filling: threading.Thread | None = None
        self._pairs: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """Each of them with its place on the host, as it was when some left last."""
        self._here = 0
        """How many of these are on the device, from the first on."""

    @property
    def device_bytes(self) -> int:
        """What they hold of the device now."""
        return self._memory.taken_bytes((*self._parameters(), *self._buffers()))

    @property
    def beside_bytes(self) -> int:
        """What buffers hold of it, and take of the host in a sleep."""
        return sum(storage.nbytes() for storage in self._buffers())

    def layout(self) -> Layout:
        storages = self._parameters()
        numbers = {storage.data_ptr(): number for number, storage in enumerate(storages)}
        tensors = [
            (name, f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} at {place}")
            for name, tensor in self._model.named_parameters(remove_duplicate=False)
            if (number := numbers.get(tensor.untyped_storage().data_ptr())) is not None
            for place in [(number, tensor.storage_offset())]
        ]
        sizes_bytes = tuple(storage.nbytes() for storage in storages)
        return Layout(tensors=tuple(tensors), sizes_bytes=sizes_bytes, beside=self._beside)

    def fill(self, where: Range) -> threading.Thread:
        """Begin to put parameters into this range, or to map what stands there, beside whatever
        follows: to have pages and to pin them takes several times as long as to copy into them.
        """

        def go() -> None:
            try:
                self._stand(where)
            except (RuntimeError, MemoryError, EngineError):
                # The sleep does it, or says why not.
                log.exception("weights are not in the pool yet")

        self._filling = threading.Thread(target=go, name="mesh-fill", daemon=True)
        self._filling.start()
        return self._filling

    def restore(self, where: Range) -> None:
        """Take the parameters of a model that has none yet from a range that is whole.

        Raises EngineError where what stands there is not what the model is made of, or is not all
        that a load gives it.
        """
        mine, theirs = self.layout(), where.layout
        for found, wanted in ((mine.tensors, theirs.tensors), (mine.beside, theirs.beside)):
            odd = sorted(set(found) ^ set(wanted))
            if odd:
                raise EngineError(f"the pool's weights are not this load's: {odd[0]} differs")
        self._stand(where)
        for storage, part in self._parts(where):
            as_bytes(storage).copy_(part, non_blocking=True)
        self._wait()

    @property
    def whole(self) -> bool:
        """Whether all of them are on the device."""
        return self._here == len(self._pairs)

    @property
    def away_bytes(self) -> int:
        """What the device has free of them."""
        if self.whole:
            return 0
        here = [storage for storage, _ in self._pairs[: self._here]]
        size_bytes = sum(int(part.nbytes) for _, part in self._pairs)
        return max(size_bytes - self._memory.taken_bytes(here), 0)

    def move(self, share: float, where: Range | None = None) -> None:
        """Have this share of them on the device, or a little less: a tensor is there whole or not
        at all. `where` and what is raised as by `to_host` and `to_device`.
        """
        if share >= 1.0 or (not self.whole and self._count(share) > self._here):
            self.to_device(share)
        else:
            self.to_host(where, share)

    def to_host(self, where: Range | None = None, share: float = 0.0) -> None:
        """See that the host has all of them, and give memory on the device back, until but a share
        of them is there. `where`: the range for the parameters, unless they stand in one.

        Raises RuntimeError, MemoryError, EngineError when it cannot be done; they are in no known
        state then.
        """
        if self.whole:
            self._pairs = self._pairs_in(where)
            self._here = len(self._pairs)
        left = min(self._count(share), self._here)
        self._memory.go([storage for storage, _ in self._pairs[left : self._here]])
        self._here = left

    def _pairs_in(self, where: Range | None) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
        """All of them, which the host has from now on."""
        if self._filling is not None:
            self._filling.join()
            self._filling = None
        where = where or self._where
        if where is None:
            raise EngineError("weights were given no place in the host's memory")
        self._stand(where)
        pairs = self._parts(where)
        for storage in self._buffers():
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
            copy.copy_(as_bytes(storage), non_blocking=True)
            pairs.append((storage, copy))
        self._wait()
        return [pair for pair in pairs if self._memory.moves(pair[0])]

    def to_device(self, share: float = 1.0) -> None:
        """The way back. Raises OutOfMemory when the device has no room, RuntimeError, EngineError
        when the copy fails; they are away as before then.
        """
        there = max(self._count(share), self._here)
        coming = self._pairs[self._here : there]
        try:
            for storage, part in coming:
                self._memory.come(storage, part.nbytes)
                as_bytes(storage).copy_(part, non_blocking=True)
            self._wait()
        except (RuntimeError, EngineError) as error:
            self._memory.go([storage for storage, _ in coming])
            if isinstance(error, torch.OutOfMemoryError):
                raise OutOfMemory(f"weights do not fit on the device: {error}") from error
            raise
        self._here = there

    def _count(self, share: float) -> int:
        """How many of them, from the first on, are no more than this share."""
        if share >= 1.0:
            return len(self._pairs)
        sizes_bytes = [int(part.nbytes) for _, part in self._pairs]
        storages = [storage for storage, _ in self._pairs]
        ends_bytes = self._memory.ends_bytes(storages, sizes_bytes)
        return bisect_right(ends_bytes, share * sum(sizes_bytes))

    def _stand(self, where: Range) -> None:
        """Have the parameters in this range. Nothing is copied if they are there."""
        self._where = where
        if self._pooled is None:
            raise EngineError("this process has no part in the host's pool of weights")
        mine, theirs = self.layout(), where.layout
        if (mine.tensors, mine.sizes_bytes) != (theirs.tensors, theirs.sizes_bytes):
            raise EngineError("the range that was given for weights is one for others")
        if self._device.type == "cuda":
            # A thread of its own has no context of the device yet, which pinning asks for.
            torch.cuda.set_device(self._device)
        self._pooled.map(where)
        if where.whole or self._filled:
            return
        cuda = self._device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream(self._device)) if cuda else nullcontext():
            for storage, part in self._parts(where):
                part.copy_(as_bytes(storage), non_blocking=True)
            if cuda:
                torch.cuda.current_stream().synchronize()
        self._pooled.mark_whole(where)
        self._filled = True

    def _parts(self, where: Range) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
        """Each storage of parameters with its place in the range."""
        assert self._pooled is not None
        storages = self._parameters()
        sizes = [storage.nbytes() for storage in storages]
        memory = self._pooled.map(where)[: sum(sizes)]
        return list(zip(storages, memory.split(sizes), strict=True))

    def _parameters(self) -> list[torch.UntypedStorage]:
        found = by_storage(self._model.parameters(), self._device)
        return [tensors[0].untyped_storage() for tensors in found.values()]

    def _buffers(self) -> list[torch.UntypedStorage]:
        """The storages of buffers that no parameter shares."""
        theirs = by_storage(self._model.parameters(), self._device)
        found = by_storage(self._model.buffers(), self._device)
        return [found[address][0].untyped_storage() for address in found if address not in theirs]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
