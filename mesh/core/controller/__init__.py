"""The controller core. Here is decided what each event means: which room it goes to, what an
operator's call does to deployments, nodes and profiles, and what of a node's report holds. `core`
takes the event and ends it by having the queues filled; `snapshot` only reads.
"""
