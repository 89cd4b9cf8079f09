"""The command line: one file a verb, `output` the only printer, `main` the composition root."""
