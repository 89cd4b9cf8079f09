"""mesh: serverless inference for many small and mid-sized LLMs on few machines.

The folders are the architecture, from the bottom up: `domain` (nouns), `policy` and `memory`
(choices and byte books), `request` (the request path), `core` (the two decision machines),
`runtime` (ports and the one loop), `wire`, `text` and `report`, then the live shells and the
command line.
"""

__version__ = "0.1.0"
