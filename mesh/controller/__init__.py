"""The live controller: gateway, control, links, registry, and the root that composes them."""
