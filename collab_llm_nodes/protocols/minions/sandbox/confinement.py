"""Rights that the sandbox process gives up for itself and its children, for good.

The interpreter grants a program nothing; this is the second layer, should the interpreter fail.
Resource limits and ``no_new_privs`` work on every Linux. Landlock (Linux 5.13 and later, where it is
switched on) takes away all files but the code of Python and the interpreter, all writing, and from
Linux 6.7 on TCP as well. It does not cover UDP.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_PR_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on x86-64 and AArch64
_RULE_PATH_BENEATH = 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_FILES_ABI_1 = (1 << 13) - 1
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache")
"""Shared libraries: the loader opens them when the interpreter starts."""

_libc = ctypes.CDLL(None, use_errno=True)


def limit_resources(process_mb: int) -> None:
    """Bound the memory of this process, and forbid it core dumps and files with content."""
    _set(resource.RLIMIT_AS, process_mb << 20)
    _set(resource.RLIMIT_FSIZE, 0)
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_NOFILE, 64)


def limit_cpu(pid: int, seconds: int) -> None:
    """Have the kernel end process ``pid`` after this much computing."""
    resource.prlimit(pid, resource.RLIMIT_CPU, (seconds, seconds))


def give_up_rights(executable: str) -> int:
    """Keep the right to run ``executable`` and to read Python's code, and give up all others.

    Returns:
        the kernel's version of Landlock; 0 without it, when files and network stay reachable.
    """
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    version: int = _libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return 0
    network = _BIND_TCP | _CONNECT_TCP if version >= 4 else 0
    files = _FILES_ABI_1
    files |= 1 << 13 if version >= 2 else 0  # moving files between folders
    files |= 1 << 14 if version >= 3 else 0  # truncating files
    attributes = struct.pack("=QQ", files, network)[: 16 if version >= 4 else 8]
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    code = {*_SYSTEM, sys.base_prefix, *sysconfig.get_paths().values(), executable}
    _allow(ruleset, code)
    _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    return version


def _allow(ruleset: int, paths: Iterable[str]) -> None:
    for path in filter(os.path.exists, paths):
        rights = _EXECUTE | _READ_FILE | (_READ_DIR if Path(path).is_dir() else 0)
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, beneath)
        _checked(_libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0))
        os.close(beneath)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "Landlock")
    return result


def _set(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
