"""The virtual shell: heap clock, cost-model engine, links with a delay, a cell made of them.

A run reads from top to bottom: what is asked, what it is made of, what goes wrong, what is seen.

    scenario_file, scenario, groups, workload, testbed    a TOML file, its nodes and its arrivals
    paper, fidelity/                                      cells of the evaluation; of a live node
    cluster: controller, callers, links, node, agent      a cell and its parts, on the `clock`
    engine: costs, sequences, lanes                       what stands in for a node's engine
    faults, injection, engine_faults                      when, how, and in which engine calls
    checking, invariants, books                           what must hold of any cell
    sampling, report                                      by the second, and as a whole
    replaying, differences                                journals, decided again
"""
