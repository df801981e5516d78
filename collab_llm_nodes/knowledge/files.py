"""Documents from files, of a few folders only."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from collab_llm_nodes.errors import ConfigError, InvalidInput, quoted
from collab_llm_nodes.knowledge.documents import Document, DocumentLimits, checked, decoded
from collab_llm_nodes.knowledge.pdf import is_pdf, may_be_pdf, read_pdf

_FIELD = "path"


class Folders:
    """Folders whose files may be read.

    A path may pass through symbolic links as long as it ends within a folder. The links are
    resolved first; the result is then opened one component after the other without following any
    link, so that nobody can put one in its way meanwhile.
    """

    def __init__(self, folders: Iterable[str | Path]) -> None:
        self._roots = tuple(Path(folder).expanduser().resolve() for folder in folders)
        for root in self._roots:
            if not root.is_dir():
                raise ConfigError(
                    f"{root} is no folder", field="folders", remedy="name folders that exist"
                )

    def read(self, path: str | Path, most: int) -> bytes:
        """Return the content of the file at ``path``.

        Args:
            path: absolute, or relative to one of the folders, the first that has it.
            most: the size that is not refused [bytes].

        Raises:
            InvalidInput: outside the folders, absent, no regular file, or too large. A path
                outside is refused in the same way whether or not something is there.
        """
        descriptor = self._open(str(path))
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidInput(f"{quoted(str(path))} is no file", field=_FIELD)
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(most + 1)
        finally:
            os.close(descriptor)
        if len(data) > most:
            raise InvalidInput(
                f"{quoted(str(path))} is too large", field=_FIELD, remedy=f"at most {most} bytes"
            )
        return data

    def _open(self, path: str) -> int:
        shown = quoted(path)
        try:
            candidates = [(root, (root / path).resolve()) for root in self._roots]
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a circle of links
            raise InvalidInput(f"{shown} is no path", field=_FIELD) from error
        inside = [(root, file) for root, file in candidates if file.is_relative_to(root)]
        if not inside:
            raise InvalidInput(
                f"{shown} is outside the folders that may be read",
                field=_FIELD,
                remedy="put the file into one of them, or add its folder",
            )
        why: OSError | None = None
        for root, file in inside:
            try:
                return _open_beneath(root, file.relative_to(root))
            except OSError as error:
                why = error
        assert why is not None
        raise InvalidInput(f"cannot read {shown}: {why.strerror}", field=_FIELD) from why


def _open_beneath(root: Path, relative: Path) -> int:
    """Open ``relative`` for reading; no component may be a symbolic link."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in relative.parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(part, flags, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Not blocking: a named pipe without a writer would be waited for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(relative.name or ".", flags, dir_fd=folder)
    finally:
        os.close(folder)


def read_document(
    path: str | Path,
    folders: Folders,
    limits: DocumentLimits,
    name: str = "",
    check: Callable[[], None] = lambda: None,
) -> Document:
    """Return the document in the file at ``path``: a PDF, or text such as Markdown and logs.

    Args:
        name: of the document; the file's own if empty.
        check: called while a PDF is read; what it raises ends that.

    Raises:
        InvalidInput: not readable, or beyond ``limits``.
        Unavailable: the process that reads PDFs cannot start.
    """
    data = folders.read(path, limits.file_bytes)
    name = name or Path(path).name
    if is_pdf(data):
        content = read_pdf(name, data, limits, check)
    else:
        try:
            content = decoded(name, data, _FIELD)
        except InvalidInput:
            if not may_be_pdf(data):
                raise
            content = read_pdf(name, data, limits, check)
    return checked(name, content, limits, _FIELD)
