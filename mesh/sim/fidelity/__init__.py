"""How true the simulator is: a live run beside a simulation of the same arrivals.

The live side is the command line's; here are the arrivals, what a node's journal tells of its
costs, the virtual cell that is made of it, and the comparison. Pure.
"""
