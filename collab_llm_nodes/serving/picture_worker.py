"""The process that decodes untrusted pictures for a server (``pictures.py`` starts it).

It writes one byte to stdout when it is ready. Then it reads requests from stdin and writes answers
to stdout, one after the other, until stdin ends. A harmful picture affects this process only: its
memory and the time for each picture are limited, and its parent may kill it.

A request is the length of the data, the width and the height of the result, and the data. An answer
is a status, a length and as many bytes: the pixels, or an error message and its remedy.
"""

from __future__ import annotations

import argparse
import signal
import struct
import sys
from typing import BinaryIO

from PIL import Image

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.pictures import decode
from collab_llm_nodes.processes import confine

REQUEST = struct.Struct("!III")
ANSWER = struct.Struct("!BI")
DECODED, REFUSED = 0, 1
READY = b"\0"


def main() -> None:
    """Serve until the parent closes the pipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-pixels", type=int, required=True)
    parser.add_argument("--max-scans", type=int, required=True)
    parser.add_argument(
        "--memory", type=int, required=True, help="bytes beyond what it starts with"
    )
    parser.add_argument("--cpu-s", type=float, required=True, help="for one picture")
    limits = parser.parse_args()
    confine(limits.memory)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(READY)
    answers.flush()
    while header := requests.read(REQUEST.size):
        length, width, height = REQUEST.unpack(header)
        data = requests.read(length)
        # RLIMIT_CPU counts whole seconds over the life of a process, this counts one picture's.
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        _answer(answers, data, (width, height), limits)
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _answer(
    answers: BinaryIO, data: bytes, size: tuple[int, int], limits: argparse.Namespace
) -> None:
    try:
        image = decode(data, limits.max_pixels, limits.max_scans)
        status, body = DECODED, image.resize(size, Image.Resampling.BICUBIC).tobytes()
    except InvalidInput as error:
        status, body = REFUSED, f"{error.args[0]}\n{error.remedy}".encode()
    except MemoryError:
        status, body = REFUSED, b"takes too much memory\nsave it again with another program"
    answers.write(ANSWER.pack(status, len(body)) + body)
    answers.flush()


if __name__ == "__main__":
    main()
