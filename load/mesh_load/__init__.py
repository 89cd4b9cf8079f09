"""Replays of traces by locust: open loop at the trace's times, by as many workers as wanted.

sender, http_sender     what a protocol's calls are, mesh's own and OpenAI's; the replay knows none
replayer                sends a worker's calls at their times
share, worker, master   which worker sends what, when all start, and what has come of it
session                 a locust process's part in it, wired to locust's events
entries, page, ending   what came of it: in locust's statistics, on its page, in files
options                 what locust is told
__main__                `make load`
"""

from pathlib import Path

LOCUSTFILE = Path(__file__).parent / "locustfile.py"
"""What `locust -f` loads."""
