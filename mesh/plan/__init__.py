"""Plans how many replicas a rate of requests needs, and of what: queues, planners, placement.

Everything here is pure. It plans whole models and single operators alike; that no engine of mesh
runs single operators on other devices is for whoever shows a plan to say (docs/operators.md).
"""
