"""The service ``dragon_index``: a side's documents, added, deleted and listed by other nodes.

Changes take seconds, so a thread of their own makes them, one after the other. Figures for the
diagnostics are those after the last change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.task import Future

from collab_llm.msg import Status as StatusMsg
from collab_llm.srv import DragonIndex
from collab_llm_nodes.errors import (
    Busy,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    Inactive,
    InvalidInput,
    quoted,
)
from collab_llm_nodes.models.detokenising import REPLACEMENT
from collab_llm_nodes.protocols.dragon.index import Index, IndexStats
from collab_llm_nodes.ros.convert import deadline_from, status_of
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.qos import REQUESTS

SERVICE = "dragon_index"
_MOST_WAITING = 16
_OPERATIONS = {
    DragonIndex.Request.STATS: "STATS",
    DragonIndex.Request.LIST: "LIST",
    DragonIndex.Request.ADD: "ADD",
    DragonIndex.Request.DELETE: "DELETE",
}


class _Change:
    """One request: its deadline, and the end that its caller waits for.

    Attributes:
        over: done when the response is complete.
    """

    def __init__(self, due: float) -> None:
        self.over = Future()
        self._due = due
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """End it at the next check."""
        self._given_up.set()

    def check(self) -> None:
        """Return if the change is still wanted.

        Raises:
            Inactive: the node does not serve any more.
            DeadlineExceeded: its time is over.
        """
        if self._given_up.is_set():
            raise Inactive("the node was deactivated", remedy="activate it")
        if time.monotonic() >= self._due:
            raise DeadlineExceeded(
                "the index was still at work",
                field="deadline_s",
                remedy="raise it; LIST tells which documents are there",
            )


class IndexService:
    """Offers ``dragon_index`` in ``node``, whose configuration has ``deadline_s``.

    Args:
        index: None: the side has no store, and every request is told so.

    Attributes:
        stats: figures after the last change; None without a store.
    """

    def __init__(self, node: ManagedNode[Any], index: Index | None) -> None:
        self._node, self._index = node, index
        self.stats: IndexStats | None = None if index is None else index.stats()
        self._changes: set[_Change] = set()
        self._thread = ThreadPoolExecutor(1, "dragon-index")
        # An awaiting callback occupies its group, see ``GenerationHost``.
        self._service = node.create_service(
            DragonIndex,
            SERVICE,
            self._serve,
            qos_profile=REQUESTS,
            callback_group=ReentrantCallbackGroup(),
        )

    def submit(self, change: Callable[[Index], Any]) -> None:
        """Have the node's own ``change`` made behind those that wait already."""
        if self._index is not None:
            self._thread.submit(self._own, change, self._index)

    def cancel_all(self) -> None:
        """End the changes that were asked for; the node's own are still made."""
        for change in self._changes:
            change.give_up()

    def close(self) -> None:
        """Wait for the change under way: the index may be closed then."""
        self.cancel_all()
        self._thread.shutdown(wait=True)

    def destroy(self) -> None:
        """Destroy the service; call it after ``close``, when the callers have their answers."""
        self._node.destroy_service(self._service)

    async def _serve(
        self, request: DragonIndex.Request, response: DragonIndex.Response
    ) -> DragonIndex.Response:
        response.header = request.header
        try:
            index = self._check(request)
            patience = deadline_from(request, self._node.config.deadline_s)
        except CollabError as error:
            self._node.warn_of(SERVICE, error)
            response.status = status_of(error)
            _put_figures(response, self.stats)
            return response
        change = _Change(time.monotonic() + patience)
        self._changes.add(change)
        asked = self._thread.submit(self._carry_out, index, request, response, change)

        def on_late() -> None:
            if asked.cancel():  # others were in progress all the time
                late = DeadlineExceeded(
                    "other changes were in progress", field="deadline_s", remedy="raise it"
                )
                response.status = status_of(late)
                self._node.post(change.over.set_result, None)

        late = threading.Timer(patience, on_late)
        late.daemon = True
        late.start()
        try:
            await change.over
        finally:
            late.cancel()
            self._changes.remove(change)
        return response

    def _check(self, request: DragonIndex.Request) -> Index:
        """Return the index if the request can be served. Raises CollabError."""
        if not self._node.active:
            raise Inactive(f"{self._node.get_name()} is not active", remedy="activate it")
        if self._index is None:
            raise ConfigError(
                "the robot's side has no documents", field="side.store", remedy="name a folder"
            )
        if len(self._changes) >= _MOST_WAITING:
            raise Busy(f"{_MOST_WAITING} changes are in progress or waiting", remedy="retry")
        operation = _OPERATIONS.get(request.operation)
        if operation is None:
            raise InvalidInput(
                f"{request.operation} is unknown",
                field="operation",
                remedy=", ".join(f"{number} = {name}" for number, name in _OPERATIONS.items()),
            )
        names, contents = request.document_names, request.document_contents
        if bool(names) != (operation in ("ADD", "DELETE")):
            raise InvalidInput(
                f"{operation} with {len(names)} names",
                field="document_names",
                remedy="give names with ADD and DELETE only",
            )
        if len(contents) != (len(names) if operation == "ADD" else 0):
            raise InvalidInput(
                f"{operation} of {len(names)} documents with {len(contents)} contents",
                field="document_contents",
                remedy="give one for each document to add, and none else",
            )
        return self._index

    # In the thread of the changes.

    def _own(self, change: Callable[[Index], Any], index: Index) -> None:
        try:
            change(index)
            self.stats = index.stats()
        except Exception as error:  # noqa: BLE001 - a thread that ends would tell nobody
            self._node.fault_of(SERVICE, error)

    def _carry_out(
        self,
        index: Index,
        request: DragonIndex.Request,
        response: DragonIndex.Response,
        change: _Change,
    ) -> None:
        try:
            if request.operation == DragonIndex.Request.ADD:
                response.statuses = self._add(index, request, change)
            elif request.operation == DragonIndex.Request.DELETE:
                response.statuses = self._delete(index, request.document_names, change)
            elif request.operation == DragonIndex.Request.LIST:
                documents = index.documents()
                response.names = [document.name for document in documents]
                response.sizes = [document.characters for document in documents]
                response.pieces = [document.chunks for document in documents]
                response.added = [document.added for document in documents]
            failed = (status for status in response.statuses if status.code != StatusMsg.OK)
            response.status = next(failed, StatusMsg())
            self.stats = index.stats()
        except CollabError as error:
            self._node.warn_of(SERVICE, error)
            response.status = status_of(error)
        except Exception as error:  # noqa: BLE001 - whatever it is must reach the caller
            response.status = status_of(self._node.fault_of(SERVICE, error))
        finally:
            _put_figures(response, self.stats)
            self._node.post(change.over.set_result, None)

    def _add(self, index: Index, request: DragonIndex.Request, change: _Change) -> list[StatusMsg]:
        statuses = []
        pairs = zip(request.document_names, request.document_contents, strict=True)
        for i, (name, content) in enumerate(pairs):
            try:
                change.check()
                if REPLACEMENT in content:
                    raise InvalidInput(
                        f"{quoted(name)} is not UTF-8",
                        field="documents",
                        remedy="convert it, for example: iconv -f latin1 -t utf-8",
                    )
                index.add(name, content, replacing=request.replace, check=change.check)
                statuses.append(StatusMsg())
            except CollabError as error:
                error.field = {
                    "name": f"document_names[{i}]",
                    "documents": f"document_contents[{i}]",
                }.get(error.field, error.field)
                self._node.warn_of(SERVICE, error)
                statuses.append(status_of(error))
        return statuses

    def _delete(self, index: Index, names: list[str], change: _Change) -> list[StatusMsg]:
        change.check()
        there = {document.name for document in index.documents()}
        known = [name for name in dict.fromkeys(names) if name in there]
        if known:
            index.delete(*known)
        return [StatusMsg() if name in there else _no_such(name, i) for i, name in enumerate(names)]


_FIGURES = (
    "documents",
    "chunks",
    "characters",
    "without_vector",
    "kv_files",
    "kv_bytes",
    "version",
)


def _put_figures(response: DragonIndex.Response, stats: IndexStats | None) -> None:
    """Put the figures after the last change into ``response``; without a store there are none."""
    if stats is not None:
        for name in _FIGURES:
            setattr(response, name, getattr(stats, name))


def _no_such(name: str, place: int) -> StatusMsg:
    return status_of(
        InvalidInput(
            f"there is no document {quoted(name)}",
            field=f"document_names[{place}]",
            remedy="see LIST",
        )
    )
