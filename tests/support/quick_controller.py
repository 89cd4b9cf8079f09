"""The real controller, with bounds that a test can wait for."""

import argparse
import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path

from mesh.controller.main import read_node_ranges
from mesh.controller.options import HTTP_OFF
from mesh.controller.server import ControllerConfig, serve
from mesh.domain.limits import CellLimits
from mesh.policy.registry import DEFAULT_POLICY


def main() -> None:
    parser = argparse.ArgumentParser(prog="quick_controller")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--queue-wait-s", type=float, default=CellLimits().queue_wait_s_max)
    parser.add_argument("--lease-s", type=float, default=CellLimits().node_lease_s)
    parser.add_argument("--adopted-s", type=float, default=CellLimits().adopted_s_max)
    parser.add_argument("--parked-s", type=float, default=0.3)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--grace-s", type=float, default=0.0)
    parser.add_argument("--http", default=HTTP_OFF)
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--nodes-wanted", action="append", default=[])
    given = parser.parse_args()
    limits = replace(
        CellLimits(),
        queue_wait_s_max=given.queue_wait_s,
        node_lease_s=given.lease_s,
        lease_check_s=0.1,
        load_retry_s=0.2,
        adopted_s_max=given.adopted_s,
        parked_s_max=given.parked_s,
        node_ranges=read_node_ranges(given.nodes_wanted),
        node_settle_s=1.0,
        node_pause_s=5.0,
        node_idle_s=5.0,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    config = ControllerConfig(
        listen=given.listen,
        http=None if given.http == HTTP_OFF else given.http,
        home=given.home,
        journal=given.journal,
        limits=limits,
        policy=given.policy,
        grace_s=given.grace_s,
    )
    asyncio.run(serve(config))


if __name__ == "__main__":
    main()
