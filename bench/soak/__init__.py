"""Minutes of mixed invocations and cancellations; nothing may leak: `make soak`."""
