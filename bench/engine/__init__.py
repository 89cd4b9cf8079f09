"""The engine side by side with OpenVINO GenAI and llama.cpp: `python -m bench.engine`."""
