"""Tests of mesh_nodes.engines.openvino."""
