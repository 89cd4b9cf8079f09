"""The vLLM adapter beyond the contract; most of it against real vLLM, by `make test-vllm`."""
