"""The nouns of mesh: frozen values without behaviour beyond arithmetic on their own fields.

Nothing here imports anything of ours; every other package imports this one.
"""
