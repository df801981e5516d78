"""Files of precomputed keys and values, beside the chunks that they belong to; bounded on disk.

``CHUNK.MODEL.safetensors`` lies in one folder. The time of a file's last use is its modification
time; those not used for longest go first. Several processes may share the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from collab_llm_nodes.durable import BUILDING, replacing
from collab_llm_nodes.errors import CollabError, InvalidInput, Unavailable

_SUFFIX = ".safetensors"
_ABANDONED_S = 3600.0
"""A file that has been under construction for longer was left by a process that is gone."""
_MODEL = re.compile(r"[0-9a-f]{8,64}")
_MODEL_DIGITS = 32


class KvFiles:
    """A cache of files by chunk and model.

    Attributes:
        most_bytes: of all files together.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self.most_bytes = folder, most_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(error) from error

    def get(self, chunk: int, model: str) -> Path | None:
        """Return the file for ``chunk``, or None; it counts as used now.

        Another process may have removed it by the time it is opened.

        Args:
            model: fingerprint of the model, in hexadecimal.
        """
        file = self._file(chunk, model)
        try:
            os.utime(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(error) from error
        return file

    def put(self, chunk: int, model: str, write: Callable[[Path], object]) -> Path:
        """Have ``write`` make the file for ``chunk``, keep it, and make room by removing others.

        Args:
            write: writes the path that it is given, such as ``session.save``.

        Raises:
            InvalidInput: the file alone is larger than all may be.
            Unavailable: the folder cannot be written.
            CollabError: whatever ``write`` raises.
        """
        file = self._file(chunk, model)
        try:
            with replacing(file) as part:
                write(part)
                part.chmod(0o600)  # as the documents whose keys and values these are
                if (size := part.stat().st_size) > self.most_bytes:
                    raise InvalidInput(
                        f"a KV file of {size} bytes",
                        field="kv_bytes",
                        remedy=f"raise it above {self.most_bytes}, or use smaller chunks",
                    )
                self._make_room(size)
        except OSError as error:
            raise _unusable(error) from error
        return file

    def remove(self, chunks: Iterable[int]) -> None:
        """Remove the files of ``chunks``, of all models."""
        gone = set(chunks)
        for file, chunk in self._files():
            if chunk in gone:
                _unlink(file)

    def keep_only(self, chunks: Iterable[int]) -> None:
        """Remove the files of all other chunks, and what processes that are gone left behind."""
        kept = set(chunks)
        for file, chunk in self._files():
            if chunk not in kept:
                _unlink(file)
        for place in self._folder.glob(f"{BUILDING}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - place.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(place, ignore_errors=True)

    def count(self) -> int:
        """Return the number of files."""
        return sum(1 for _ in self._files())

    def size(self) -> int:
        """Return the bytes of all files together."""
        return sum(size for _, size, _ in self._by_use())

    def _make_room(self, size: int) -> None:
        held = self._by_use()
        total = size + sum(size for _, size, _ in held)
        for _, freed, file in held:
            if total <= self.most_bytes:
                return
            _unlink(file)
            total -= freed

    def _by_use(self) -> list[tuple[int, int, Path]]:
        """Return time of last use [ns], size [bytes] and path of each file, oldest first."""
        found = []
        for file, _ in self._files():
            with contextlib.suppress(FileNotFoundError):
                facts = file.stat()
                found.append((facts.st_mtime_ns, facts.st_size, file))
        return sorted(found)

    def _files(self) -> Iterator[tuple[Path, int]]:
        for file in self._folder.glob(f"*{_SUFFIX}"):
            chunk = file.name.partition(".")[0]
            if chunk.isdecimal():
                yield file, int(chunk)

    def _file(self, chunk: int, model: str) -> Path:
        if not _MODEL.fullmatch(model):
            raise InvalidInput(
                f"{model[:80]!r} is no fingerprint",
                field="model",
                remedy="give 8 to 64 hexadecimal digits",
            )
        return self._folder / f"{chunk}.{model[:_MODEL_DIGITS]}{_SUFFIX}"


def _unlink(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(error) from error


def _unusable(error: OSError) -> CollabError:
    return Unavailable(
        f"cannot use the folder of KV files: {error}",
        field="store",
        remedy="make room, or give a writable folder",
    )
