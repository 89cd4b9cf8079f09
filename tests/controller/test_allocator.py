"""What a controller has freed goes back to the system."""

import subprocess
import sys

FREES = """
import asyncio
from pathlib import Path
from mesh.controller import allocator

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

async def main():
    allocator.LOOK_S = 0.05
    giving_back = asyncio.create_task(allocator.give_back_freed())
    await asyncio.sleep(0.2)
    made = [bytes(1000) for _ in range(100_000)]
    on_top = bytes(1000)  # what lies behind keeps the heap from shrinking by itself
    full = resident_bytes()
    del made
    for _ in range(100):
        await asyncio.sleep(0.05)
        if resident_bytes() < full - (80 << 20):
            print("back")
            return

asyncio.run(main())
"""


def test_freed_memory_goes_back_although_something_lies_behind_it() -> None:
    done = subprocess.run([sys.executable, "-c", FREES], capture_output=True, text=True, check=True)
    assert done.stdout == "back\n"
