"""Writes and reads at a steady rate until it is killed: the disk's part of offloading, alone.

    python scripts/disk_traffic.py WRITE_BYTES_PER_SECOND READ_BYTES_PER_SECOND DIRECTORY

Blocks, buffers in huge pages and threads are those of a session's engine. There are no hooks and no
copies, and no computation waits for a block: what a training step loses beside this process is what
the traffic itself costs the machine. Prints a line once it is under way.

Exit status: 2 for wrong usage; 3 if the disk does not keep up. It does not end by itself.
"""

from __future__ import annotations

import sys
import time
from itertools import cycle
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offload import _native

BLOCK_BYTES = 4 << 20
FILE_BLOCKS = 128
IN_FLIGHT = 4
MOST_LATE_SECONDS = 2


@click.command()
@click.argument("write_rate", type=click.FloatRange(min=0))
@click.argument("read_rate", type=click.FloatRange(min=0))
@click.argument("directory", type=click.Path(exists=True, file_okay=False, writable=True))
def main(write_rate: float, read_rate: float, directory: str) -> None:
    """Write and read so many bytes a second in DIRECTORY, until killed."""
    if write_rate + read_rate <= 0:
        raise click.UsageError("both rates are 0: nothing would move")
    file = _native.File(directory)
    file.reserve(FILE_BLOCKS * BLOCK_BYTES)
    queue = _native.Queue(file)
    arena = _native.Arena(IN_FLIGHT * BLOCK_BYTES)
    slots = [arena.allocate(BLOCK_BYTES) for _ in range(IN_FLIGHT)]
    for slot in slots:
        assert slot is not None
        torch.frombuffer(slot, dtype=torch.uint8).random_()
    for block in range(FILE_BLOCKS):
        queue.write(slots[0], block * BLOCK_BYTES).wait()
    print("under way", flush=True)
    pending: list[_native.Request | None] = [None] * IN_FLIGHT
    seconds_per_block = BLOCK_BYTES / (write_rate + read_rate)
    write_share = write_rate / (write_rate + read_rate)
    due, owed = time.perf_counter(), 0.0
    for number in cycle(range(FILE_BLOCKS)):
        turn = number % IN_FLIGHT
        request = pending[turn]
        if request is not None:
            request.wait()
        owed += write_share
        move = queue.write if owed >= 1 else queue.read
        owed -= owed >= 1
        pending[turn] = move(slots[turn], number * BLOCK_BYTES)
        due += seconds_per_block
        late_seconds = time.perf_counter() - due
        if late_seconds < 0:
            time.sleep(-late_seconds)
        elif late_seconds > MOST_LATE_SECONDS:
            click.echo("Error: the disk cannot keep up with these rates", err=True)
            sys.exit(3)


if __name__ == "__main__":
    main()
