"""The engine of CPU nodes, on OpenVINO with its own paged attention and block tables.

The only package that imports openvino. `engine.OpenVinoEngine` implements the engine port. Nothing
is imported here: a child process that prepares weights needs no OpenVINO, whose import takes longer
than a small model's weights do.
"""
