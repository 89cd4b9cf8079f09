"""The request path's decisions: admission and placement in the controller, turns on the node."""
