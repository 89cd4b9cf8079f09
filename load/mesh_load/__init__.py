"""Replays of traces by locust: open loop at the trace's times, by as many workers as wanted.

sender, grpc_sender    a protocol's calls; the replay itself knows none
replayer               sends a worker's calls at their times
share, worker, master  which worker sends what, when all start, and what has come of it
figures, page          what came of it as locust's statistics, on its page and in its files
locustfile             what `locust -f` loads: puts these together
"""
