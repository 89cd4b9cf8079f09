"""What the controller core knows: the cell's entries, what it expects of models on devices, and the
context of the event that is being handled. Nothing is decided here.
"""
