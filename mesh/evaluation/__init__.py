"""Measuring and comparing, apart from what serves: production does not import it.

bursts, load_client                    calls, and their sending to a live cell, each at its time
summary, distribution                  outcomes of requests in numbers
series, cell_numbers                   nodes by the second; a run of a cell in numbers
simulation_report                      what `mesh sim` says of a run
replaying                              journals, decided again
charts/                                charts as values; SVG and PNG
paper/                                 the evaluation of LLM-Mesh on virtual nodes
fidelity/                              a live run beside a simulation of it
replay/                                a trace's calls to a running cell
"""
