"""The virtual shell: heap clock, cost-model engine, links with a delay, a cell made of them.

A run reads from top to bottom: what is asked, what it is made of, what goes wrong. What is seen
of it, and said, is `mesh.evaluation`.

    scenario, groups, workload, testbed    a TOML file, its nodes and its arrivals
    cluster: callers, links, node, agent                  a cell and its parts, on the `clock`
    engine: costs, virtual_engine, sequences, lanes       what stands in for a node's engine
    faults                                                when, and in which engine calls
    checking, invariants                                  what must hold of any cell
"""
