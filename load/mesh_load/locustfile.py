"""What `locust -f` loads: a user, a shape and the listeners that replay a trace against a cell.

The composition root of a locust process, be it master, worker or both. Users send nothing by
themselves: a worker's calls are due at the trace's times, however many users there are; one user a
worker stands for it, and ends with it.
"""

import argparse
import os
import sys
from typing import Any

from locust import LoadTestShape, User, constant, events, task
from locust.env import Environment

from mesh.cli import output
from mesh.cli.main import FAILED, USAGE
from mesh.domain.errors import InvalidInput, MeshError
from mesh_load.http_sender import HttpSender
from mesh_load.options import add_options, show_credentials
from mesh_load.sender import GrpcSender, Sender, wait_by_gevent
from mesh_load.session import Session
from mesh_load.share import Share

USERS_PER_S = 100.0


def _sender(share: Share) -> Sender:
    return HttpSender(share.address) if share.http else GrpcSender(share.address)


SESSION = Session(_sender)


class ReplayUser(User):
    """Stands for its worker's replay."""

    wait_time = constant(1.0)

    @task
    def replay(self) -> None:
        SESSION.worker.join()


class ReplayShape(LoadTestShape):
    """One user a worker, until the replay is over."""

    def tick(self) -> tuple[int, float] | None:
        return None if SESSION.ended() else (SESSION.users(), USERS_PER_S)


def _add_options(parser: argparse.ArgumentParser, **_: Any) -> None:
    add_options(parser)


def _enter(environment: Environment, **_: Any) -> None:
    wait_by_gevent()
    assert environment.parsed_options is not None, "locust was started without options"
    try:
        show_credentials(environment.parsed_options, os.environ)
        SESSION.enter(environment)
    except MeshError as error:
        output.error(error)
        sys.exit(USAGE if isinstance(error, InvalidInput) else FAILED)


events.init_command_line_parser.add_listener(_add_options)
events.init.add_listener(_enter)
