"""Turn rules as code: which instance of a node computes next, and for whom.

A rule is a frozen value. The node core runs it, and shadow validation (`mesh.request.shadow`) rolls
the same object forward. `turns` has its protocol, `run_queues` what it sees.
"""
