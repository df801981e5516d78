"""Permanent confinement of the sandbox process and its children.

The interpreter gives programs no access; this is the second layer, should the interpreter fail.
Resource limits, ``no_new_privs`` and the ban on sockets (seccomp) work on every Linux. Landlock
(Linux 5.13 and later, if enabled) forbids all writing, and reading of all files except the code of
Python, the interpreter and the system's libraries.
"""

from __future__ import annotations

import ctypes
import os
import platform
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
_SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache")
"""Shared libraries, which the loader opens when the interpreter starts."""

_PR_SET_SECCOMP, _FILTER = 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_OR_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001
_IO_URING_SETUP = 425
_X32 = 0x40000000  # numbers of a second set of system calls on x86-64
_SOCKET = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""AUDIT_ARCH of the architecture, and its number of the system call ``socket``."""

_libc = ctypes.CDLL(None, use_errno=True)


def limit_resources(process_mb: int) -> None:
    """Limit the memory of this process, and forbid core dumps and files with content."""
    _set(resource.RLIMIT_AS, process_mb << 20)
    _set(resource.RLIMIT_FSIZE, 0)
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_NOFILE, 64)


def limit_cpu(pid: int, seconds: int) -> None:
    """Limit the CPU time of process ``pid``, which the kernel then kills."""
    resource.prlimit(pid, resource.RLIMIT_CPU, (seconds, seconds))


def drop_rights() -> int:
    """Drop all rights but to read and run Python's code; call it while there is one thread.

    Returns:
        The kernel's version of Landlock; 0 without it, when files stay reachable.
    """
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _ban_sockets()
    version: int = _libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return 0
    files = _FILES_ABI_1
    files |= 1 << 13 if version >= 2 else 0  # moving files between folders
    files |= 1 << 14 if version >= 3 else 0  # truncating files
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, struct.pack("=Q", files), 8, 0))
    _allow(ruleset, {*_SYSTEM, sys.base_prefix, *_code()})
    _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    return version


def _ban_sockets() -> None:
    """Forbid new sockets, and io_uring, which could create some."""
    if platform.machine() not in _SOCKET:
        return
    architecture, socket = _SOCKET[platform.machine()]
    program = (  # operation, jump if true, jump if false, operand
        (_LOAD, 0, 0, 4),  # architecture
        (_JUMP_EQUAL, 0, 4, architecture),
        (_LOAD, 0, 0, 0),  # number of the system call
        (_JUMP_GREATER_OR_EQUAL, 2, 0, _X32),
        (_JUMP_EQUAL, 1, 0, socket),
        (_JUMP_EQUAL, 0, 1, _IO_URING_SETUP),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(code))
    _checked(_libc.prctl(_PR_SET_SECCOMP, _FILTER, filter_program, 0, 0))


def _code() -> set[str]:
    """Return the folders of Python's code and scripts."""
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    return {sysconfig.get_path(name, scheme) for name in names for scheme in schemes}


def _allow(ruleset: int, paths: Iterable[str]) -> None:
    for path in filter(os.path.exists, paths):
        rights = _EXECUTE | _READ_FILE | (_READ_DIR if Path(path).is_dir() else 0)
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, beneath)
        _checked(_libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0))
        os.close(beneath)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "the kernel refused a restriction")
    return result


def _set(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
