"""A locust process in a replay: its part as worker, master or both, wired to locust's events.

Workers hear of their share, the start and a stop by messages, and answer in their reports to the
master. A process alone is both, and its messages go to itself. Before: `locustfile`. After:
`worker`, `master`; `ending`, which writes down what came.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import STATE_MISSING, LocalRunner, MasterRunner, WorkerRunner

from mesh.cli.replay_options import asked_of, trace_asked
from mesh.evaluation.replay.cell import contexts_of, deployed, prompts_of
from mesh.evaluation.replay.results import CallResult
from mesh.wire.client import MeshClient
from mesh_load import entries, page
from mesh_load.ending import Ending
from mesh_load.master import Master, Word
from mesh_load.options import Options, read_options
from mesh_load.sender import Sender
from mesh_load.share import Share
from mesh_load.worker import STOP_S_MAX, Worker
from mesh_workloads.replay_plan import ReplayPlan, plan_replay

LOCAL = "local"
"""What locust calls a process that is its own worker."""
POLL_S = 0.05
KEY = "mesh"
"""In a worker's report to the master."""


class Session:
    """One process's part in replays; it may see several runs, where a page starts them."""

    def __init__(self, sender_of: Callable[[Share], Sender]) -> None:
        self.worker = Worker(sender_of, self._log)
        self.master: Master | None = None
        self._environment: Environment | None = None
        self._ended = False
        """By itself, rather than by somebody who stopped it."""

    def enter(self, environment: Environment) -> None:
        """Take the part that the process has. A master prepares the run; raises what `prepare`
        raises.
        """
        self._environment = environment
        runner = environment.runner
        if isinstance(runner, MasterRunner | LocalRunner):
            self._enter_as_master(environment, runner)
        if isinstance(runner, WorkerRunner | LocalRunner):
            self._enter_as_worker(environment, runner)

    def _enter_as_master(
        self, environment: Environment, runner: MasterRunner | LocalRunner
    ) -> None:
        assert environment.parsed_options is not None, "locust was started without options"
        options = read_options(environment.parsed_options)
        prepared = prepare(options)
        master = Master(prepared.share, runner.send_message)
        ending = Ending(environment, options, prepared.plan, master)
        self.master = master
        events = environment.events
        runner.register_message(Word.READY, lambda msg, **_: master.ready(msg.node_id))
        runner.register_message(Word.REPORT, lambda msg, **_: master.take(msg.node_id, msg.data))
        events.worker_report.add_listener(lambda client_id, data: master.take(client_id, data[KEY]))

        def start(**_: Any) -> None:
            self._ended = False
            ending.begin()
            master.begin(self._workers())

        def stop(**_: Any) -> None:
            by_itself = self._ended
            self._stop_all(master)
            # A signal may reach the workers first, and the run is over before it was stopped.
            ending.stopped = master.interrupted or not by_itself

        events.test_start.add_listener(start)
        events.test_stopping.add_listener(stop)
        events.test_stop.add_listener(ending.write)
        events.quit.add_listener(ending.show)
        if environment.web_ui is not None:
            page.extend(environment.web_ui, ending.report)

    def _enter_as_worker(
        self, environment: Environment, runner: WorkerRunner | LocalRunner
    ) -> None:
        def take(msg: Any, **_: Any) -> None:
            if self.worker.take(msg.data):
                runner.send_message(Word.READY)

        def start(msg: Any, **_: Any) -> None:
            self.worker.start(msg.data["start_unix_s"])

        def stop(**_: Any) -> None:
            self.worker.stop()
            for report in self.worker.rest():
                runner.send_message(Word.REPORT, report)

        runner.register_message(Word.SHARE, take)
        runner.register_message(Word.START, start)
        runner.register_message(Word.STOP, stop, concurrent=True)
        if isinstance(runner, WorkerRunner):
            environment.events.report_to_master.add_listener(
                lambda client_id, data: data.update({KEY: self.worker.report()})
            )
            # A worker that is interrupted itself says what came before it says that it goes.
            environment.events.quitting.add_listener(stop)

    def users(self) -> int:
        """One for each worker that takes part."""
        parts = self.master.parts if self.master else {}
        return max(1, len(parts or self._workers()))

    def ended(self) -> bool:
        """Whether the run is over; asked of the master now and then while it runs."""
        self._ended = self._over()
        return self._ended

    def _over(self) -> bool:
        assert self.master is not None, "only a master has a shape"
        if isinstance(self._runner, LocalRunner):
            self.master.take(LOCAL, self.worker.report())
        return self.master.over(self._workers())

    def _stop_all(self, master: Master) -> None:
        """What was sent is to be in the report: wait for it, for a bounded time."""
        master.stop()
        until_s = time.monotonic() + STOP_S_MAX + 1.0
        while not self._over() and time.monotonic() < until_s:
            gevent.sleep(POLL_S)

    def _workers(self) -> list[str]:
        """Those that can take part, in the order in which they came."""
        runner = self._runner
        if isinstance(runner, MasterRunner):
            return [node.id for node in runner.clients.values() if node.state != STATE_MISSING]
        return [LOCAL]

    @property
    def _runner(self) -> Any:
        assert self._environment is not None, "used before it entered"
        return self._environment.runner

    def _log(self, result: CallResult) -> None:
        assert self._environment is not None, "used before it entered"
        entries.log(self._environment, result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    plan: ReplayPlan
    share: Share
    """The share that holds all calls."""


def prepare(options: Options) -> Prepared:
    """Raises InvalidInput, NotFound and StorageError for what cannot be replayed, Unavailable when
    the cell does not answer.
    """
    asked = asked_of(options.given)
    with MeshClient(options.address) as client:
        found = deployed(client)
        trace = trace_asked(options.trace, options.given, max(len(asked.deployments or found), 1))
        plan = plan_replay(trace, asked, contexts_of(found))
        called = sorted({call.deployment for call in plan.calls})
        prompts = prompts_of(client, (found[name] for name in called), seed=options.given["seed"])
    share = Share(
        address=options.http or options.address,
        slos={name: found[name].spec.slo for name in called},
        sentences={name: each.sentences for name, each in prompts.items()},
        seed=options.given["seed"],
        forced=plan.forced,
        calls=plan.calls,
        calls_whole=len(plan.calls),
        http=options.http is not None,
    )
    return Prepared(plan=plan, share=share)
