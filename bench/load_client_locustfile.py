"""mesh's locustfile, which also writes down when every token came: `--tokens FILE`."""

import argparse
import json
from pathlib import Path
from typing import Any

from locust import events
from locust.env import Environment

from mesh_load.locustfile import SESSION, ReplayShape, ReplayUser

__all__ = ["ReplayShape", "ReplayUser"]


def _add(parser: argparse.ArgumentParser, **_: Any) -> None:
    parser.add_argument("--tokens")


def _write(environment: Environment, **_: Any) -> None:
    """Writes, for every call by the length of its prompt, when it was sent and when its tokens
    came, on the machine's clock.
    """
    options, master = environment.parsed_options, SESSION.master
    if master is None or options is None:
        return
    rows = {
        result.call.input_tokens: {
            "due_s": master.start_s + result.call.at_s,
            "sent_s": master.start_s + result.outcome.arrival_s,
            "tokens_s": [master.start_s + at_s for at_s in result.outcome.tokens_s],
        }
        for result in master.results.values()
    }
    Path(options.tokens).write_text(json.dumps(rows))


events.init_command_line_parser.add_listener(_add)
events.test_stop.add_listener(_write)
