"""What engine processes find in their environment: how vLLM is to be, read while it is imported.

Part of what `internals` relies on, apart from it because the agent sets it without importing vLLM.
"""

ENVIRONMENT = {
    # The engine core in the engine process itself, and the model runner that the rest is about.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # A context of the model's full length and one more, of which nothing is ever computed.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    # Cores are the node's to give, and not this process's alone.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
