"""A thin supplier of nodes on machines of Ray: it starts, watches and adopts their agents, and asks
Ray for machines and gives them back. Ray sees no prompt, no token and no placement, and may die at
any time.
"""
