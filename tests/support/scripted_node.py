"""A node agent with the scripted engine: `scripted_node [SCRIPT] -- ARGUMENTS`.

Everything but the engine is the real node agent; ARGUMENTS are its own (`python -m mesh_nodes
--help`). SCRIPT says how the engine behaves.
"""

import argparse
import sys

from mesh.runtime.engine import Engine
from mesh_nodes.main import main
from mesh_nodes.options import NodeOptions
from mesh_nodes.text_engine import TextEngine
from tests.support.scripted_engine import Script, ScriptedEngine

FOREVER = 1 << 30


def _script(words: list[str]) -> Script:
    parser = argparse.ArgumentParser(prog="scripted_node")
    parser.add_argument("--step-s", type=float, default=0.0, help="how long an iteration takes")
    parser.add_argument("--load-s", type=float, default=0.0, help="how long a load takes")
    parser.add_argument("--fail-loads", action="store_true", help="every load fails")
    parser.add_argument("--fail-steps", type=int, default=0, help="so many iterations fail")
    parser.add_argument("--measure-at-once", action="store_true", help="profiles take no time")
    given = parser.parse_args(words)
    return Script(
        step_s=given.step_s,
        load_s=given.load_s,
        fail_loads=FOREVER if given.fail_loads else 0,
        fail_steps=given.fail_steps,
        measures_at_once=given.measure_at_once,
    )


def run(arguments: list[str]) -> int:
    split = arguments.index("--")
    script = _script(arguments[:split])

    def engine_of(options: NodeOptions) -> Engine:
        return TextEngine(ScriptedEngine(script, memory_bytes=options.memory_bytes))

    return main(arguments[split + 1 :], engine_of)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
