"""Has mesh import each case of `model_files`, and a cell deploy some of them.

An import runs in one process for all cases, with a bound on its memory, and goes on to what
a node does with a model before it loads it: its architecture, its footprint, its text, a prompt,
and the message to the controller. Undocumented is whatever is no error of the caller's, and what
ends the process; a case that takes longer than a call may hangs. Of those that a cell deploys, one
that could be is asked for an answer.
"""

import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from bench.demo_model import store_path
from bench.fuzz.findings import CALL_S_MAX, Findings
from bench.fuzz.model_files import Case, cases
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import InvalidInput, MeshError, Refused, TornModel, UnsupportedModel
from mesh.domain.ids import DeploymentName, OperationId
from mesh.domain.invocation import Invocation, TextPrompt
from mesh.domain.messages import ImportDone
from mesh.domain.model import KvPrecision, WeightPrecision
from mesh.domain.reasons import RefusalReason
from mesh.domain.text import ChatMessage
from mesh.text.assets import read_assets
from mesh.text.tokenizer import TextCodec
from mesh.wire.client import MeshClient
from mesh.wire.codec import report_from_wire
from mesh.wire.unread import reports_written
from mesh_loader.store import ModelStore, StoredModel
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.footprint import estimate

CALLERS = (InvalidInput, TornModel, UnsupportedModel)
"""What an import may be refused with: the files are wrong, and no other try goes better."""
MEMORY_BYTES_MAX = 6 << 30
"""The address space of the process that imports; libraries map 2 GiB of it."""
CHARS_MAX = 4000
"""The longest message of an error that is kept."""
DEPLOYED_OF = 200
"""A cell deploys one of so many, and one of fewer of those that can be imported."""
IMPORTED_DEPLOYED_OF = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    wrong: str = ""


IMPORTED = Outcome("imported")


def fuzz_files(
    address: str, *, cases_max: int, seeded: int, deployed_of: int = DEPLOYED_OF
) -> Findings:
    findings = Findings()
    numbers, whole = count(), count()
    with tempfile.TemporaryDirectory() as scratch, closing(Importer()) as importer:

        @seed(seeded)
        @settings(
            max_examples=cases_max,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases())
        def ask(case: Case) -> None:
            number = next(numbers)
            folder = Path(scratch) / f"{number}"
            source = f"file://{case.write(folder)}"
            outcome = importer.ask(case, source, str(Path(scratch) / "store"), findings)
            imported = outcome == IMPORTED and next(whole) % IMPORTED_DEPLOYED_OF == 0
            if imported or (outcome is not None and number % deployed_of == 0):
                _deploy(address, DeploymentName(f"files-{number}"), source, case, findings)
            shutil.rmtree(folder, ignore_errors=True)

        ask()
        _forget(f"file://{scratch}/")
    return findings


class Importer:
    """The process that imports; another one after a case that has ended or held it."""

    def __init__(self) -> None:
        self._pool = self._begun()

    def ask(self, case: Case, source: str, store: str, findings: Findings) -> Outcome | None:
        """None where the process did not outlive it."""
        what = f"{case.what} {case.special} {_content(case)}"
        try:
            outcome = self._pool.submit(tried, source, store).result(CALL_S_MAX)
        except Late:
            findings.ended("hang")
            findings.hung(what)
        except BrokenProcessPool:
            findings.ended("process ended")
            findings.unexpected(f"the process ended for {what}")
        else:
            findings.ended(outcome.name)
            if outcome.wrong:
                findings.unexpected(f"{outcome.wrong} for {what}")
            return outcome
        self.close()
        self._pool = self._begun()
        return None

    def processes(self) -> list[int]:
        """Their ids; the pool itself does not say."""
        return list(self._pool._processes or ())

    def close(self) -> None:
        processes = self.processes()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _begun(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_bound_memory)


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))


def tried(source: str, store: str) -> Outcome:
    """What becomes of the import, and of what comes after it."""
    try:
        shutil.rmtree(store, ignore_errors=True)
        return _used(ModelStore(Path(store)).import_model(source))
    except MeshError as error:
        return Outcome(type(error).__name__, _improper(error))
    except BaseException as error:  # a panic of a Rust library is no Exception
        return Outcome("untyped", f"{type(error).__name__}: {str(error)[:CHARS_MAX]}")


def _used(stored: StoredModel) -> Outcome:
    read_architecture(stored.path)
    footprint = estimate(stored.info, weights=WeightPrecision.I8, kv=KvPrecision.F16)
    assets = read_assets(stored.path)
    done = ImportDone(
        operation_id=OperationId("o"), model=stored.info, footprint=footprint, text=assets
    )
    if [report_from_wire(message) for message in reports_written(done)] != [done]:
        return Outcome("imported", "what was imported does not fit its message")
    codec = TextCodec(assets)
    codec.decode(codec.encode("Hello, wörld 12"))
    if assets.chat_template:
        codec.encode_chat([ChatMessage(role="user", content="hi")])
    return IMPORTED


def _improper(error: MeshError) -> str:
    said = f"{type(error).__name__}: {error.message[:CHARS_MAX]}"
    if not isinstance(error, CALLERS):
        return f"no error of the caller's: {said}"
    if len(error.message) > CHARS_MAX or "\n" in error.message + error.hint:
        return f"no line for people: {said}"
    return f"it suggests another try: {error.hint}" if "try again" in error.hint else ""


def _deploy(
    address: str, name: DeploymentName, source: str, case: Case, findings: Findings
) -> None:
    """On the cell: every error is the caller's, by name, and the answers that come are whole."""
    asked = Invocation(deployment=name, prompt=TextPrompt(text="Hello"), max_tokens=2)
    with MeshClient(address) as client:
        try:
            client.deploy(DeploymentSpec(name=name, source=source))
        except MeshError as error:
            findings.ended(f"deploy: {type(error).__name__}")
            if wrong := _improper(error):
                findings.unexpected(f"deploy: {wrong} for {case.what} {_content(case)}")
            return
        ending = _ended(lambda: list(client.invoke(asked)))
        findings.ended(f"deployed: {ending.name}")
        if ending.wrong:
            findings.unexpected(f"invoke: {ending.wrong} for {case.what} {_content(case)}")
        client.delete(name)


def _ended(call: Callable[[], object]) -> Outcome:
    try:
        call()
    except Refused as error:
        # What a model's numbers come to, its engine may not have the memory for.
        wrong = "" if error.reason is RefusalReason.LOAD_FAILED else error.message
        return Outcome(f"refused, {error.reason}", wrong)
    except MeshError as error:
        return Outcome(type(error).__name__, _improper(error))
    return Outcome("answered")


def _forget(sources: str) -> None:
    """Takes what the cell has imported out of the usual store."""
    store = ModelStore(store_path())
    for stored in store.models():
        if stored.info.source.startswith(sources):
            store.remove(stored.info.model_id)


def _content(case: Case) -> str:
    """What is wrong, as far as a line can show it."""
    name = case.what.removeprefix("damaged ")
    content = case.files.get({"template": "chat_template.jinja"}.get(name, name), b"")
    return f"{content[:300]!r}"
