"""How true the simulator is: a live run beside a simulation of the same arrivals.

live                      what both sides serve; a live cell under bursts
observing, calibrating    what a node's journal tells of its costs
planning, comparing       the virtual cell that is made of it, and both sides
report                    all of it in order
"""
