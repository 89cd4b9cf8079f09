"""The public trace formats, one file each: what their columns mean.

Each module has a `FORMAT`: by which header it is recognised, and what one row holds.
"""
