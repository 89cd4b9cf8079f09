"""Replays of traces by locust: open loop at the trace's times, by as many workers as wanted.

sender                  what a protocol's calls are; the replay itself knows none
grpc_sender             mesh's own, http_sender OpenAI's
replayer                sends a worker's calls at their times
share, worker, master   which worker sends what, when all start, and what has come of it
session                 a locust process's part in it, wired to locust's events
entries, page, ending   what came of it: in locust's statistics, on its page, in files
options, preparing      what locust is told, and the run that it comes to
__main__                `make load`
"""

from pathlib import Path

LOCUSTFILE = Path(__file__).parent / "locustfile.py"
"""What `locust -f` loads."""
