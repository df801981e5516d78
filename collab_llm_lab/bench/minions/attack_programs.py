"""Hostile programs for tests and benchmark of the sandbox.

``LEAKS`` are bodies that set ``found`` to the canary, which is in a file, its name and the
environment, or that leave a trace. ``WORKS`` are those that succeed in plain Python, so that the
tests would notice. ``FILE``, ``FOLDER``, ``TRACE`` and ``PORT`` stand for the host's. ``BOMBS`` are
bodies that use unlimited time or memory.
"""

from __future__ import annotations

LEAKS: dict[str, str] = {
    # files
    "open": "found = open('FILE').read()",
    "open binary": "found = open('FILE', 'rb').read().decode()",
    "open descriptor": "found = open(3, closefd=False).read()",
    "io": "import io; found = io.open('FILE').read()",
    "io low level": "import io; found = io.FileIO('FILE').readall().decode()",
    "os.open": "import os; found = os.read(os.open('FILE', 0), 99).decode()",
    "pathlib": "import pathlib; found = pathlib.Path('FILE').read_text()",
    "pathlib home": "import pathlib; found = pathlib.Path.home().read_text()",
    "codecs": "import codecs; found = codecs.open('FILE').read()",
    "linecache": "import linecache; found = linecache.getline('FILE', 1)",
    "fileinput": "import fileinput; found = next(fileinput.input('FILE'))",
    "mmap": "import mmap; f = open('FILE', 'rb'); found = mmap.mmap(f.fileno(), 0, prot=1).read()",
    "listdir": "import os; found = os.listdir('FOLDER')",
    "scandir": "import os; found = [e.name for e in os.scandir('FOLDER')]",
    "walk": "import os; found = list(os.walk('FOLDER'))",
    "glob": "import glob; found = glob.glob('FOLDER/*')",
    "iterdir": "import pathlib; found = list(pathlib.Path('FOLDER').iterdir())",
    "write": "open('TRACE', 'w').write('x'); found = ''",
    "write pathlib": "import pathlib; found = pathlib.Path('TRACE').write_text('x')",
    "mkdir": "import os; found = os.mkdir('TRACE')",
    "symlink": "import os; found = os.symlink('FILE', 'TRACE')",
    "rename": "import os; found = os.link('FILE', 'TRACE')",
    "copy": "import shutil; found = shutil.copy('FILE', 'TRACE')",
    "sqlite": "import sqlite3; found = sqlite3.connect('TRACE').execute('create table t (a)')",
    "shelve": "import shelve; found = shelve.open('TRACE')['a']",
    "logging": "import logging; found = logging.FileHandler('TRACE').emit(None)",
    "import of a file": "import sys; sys.path.append('FOLDER'); import canary_module as found",
    "open in a comprehension": "found = [line for line in open('FILE')]",
    "open by another name": "o = open; found = (lambda p: o(p).read())('FILE')",
    # network
    "socket": "import socket; found = socket.create_connection(('127.0.0.1', PORT), 1)",
    "socket low level": "import _socket; s = _socket.socket(); s.connect(('127.0.0.1', PORT))",
    "urllib": "import urllib.request as u; found = u.urlopen('http://127.0.0.1:PORT', timeout=1)",
    "http": "import http.client as h; h.HTTPConnection('127.0.0.1', PORT).request('G', '/')",
    "asyncio": ("import asyncio; found = asyncio.run(asyncio.open_connection('127.0.0.1', PORT))"),
    "ftplib": "import ftplib; found = ftplib.FTP().connect('127.0.0.1', PORT, 1)",
    # processes
    "system": "import os; found = os.system('touch TRACE')",
    "popen": "import os; found = os.popen('cat FILE').read()",
    "subprocess": "import subprocess; found = subprocess.check_output(['cat', 'FILE']).decode()",
    "posix_spawn": "import os; found = os.posix_spawn('/bin/touch', ['touch', 'TRACE'], {})",
    "fork": "import os; found = os.fork() or open('TRACE', 'w')",
    "multiprocessing": (
        "import multiprocessing as m; p = m.Process(target=open, args=('TRACE', 'w'));"
        " p.start(); p.join()"
    ),
    "thread": "import threading; t = threading.Thread(target=open, args=('TRACE', 'w')); t.start()",
    "ctypes": "import ctypes; found = ctypes.CDLL(None).creat(b'TRACE', 0o600)",
    "kill the parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "pty": "import pty; found = pty.spawn(['touch', 'TRACE'])",
    # introspection
    "environ": "import os; found = os.environ['COLLAB_CANARY']",
    "getenv": "import os; found = os.getenv('COLLAB_CANARY')",
    "environ of a process": "found = open('/proc/self/environ').read()",
    "dunder import": "found = __import__('os').environ['COLLAB_CANARY']",
    "builtins": "import builtins; found = builtins.open('FILE').read()",
    "dunder builtins": "found = __builtins__['open']('FILE').read()",
    "subclasses": (
        "found = [c for c in ().__class__.__base__.__subclasses__()"
        " if c.__name__ == 'Popen' or c.__name__ == '_wrap_close']"
        "[0].__init__.__globals__['environ']['COLLAB_CANARY']"
    ),
    "mro": "found = type('').mro()[-1].__subclasses__()",
    "globals of a function": "found = prepare_jobs.__globals__['__builtins__'].open('FILE').read()",
    "globals of a host function": "found = chunk_by_page.__globals__",
    "closure of a host function": "found = chunk_by_page.__closure__[0].cell_contents",
    "self of a host function": "found = chunk_by_page.__self__",
    "frame": "import sys; found = sys._getframe(1).f_globals",
    "traceback": (
        "try:\n        1 / 0\n    except Exception as e:\n"
        "        found = e.__traceback__.tb_frame.f_builtins['open']('FILE').read()"
    ),
    "generator frame": "found = (x for x in []).gi_frame.f_builtins['open']('FILE').read()",
    "modules": "import sys; found = sys.modules['os'].environ['COLLAB_CANARY']",
    "gc": "import gc; found = [o for o in gc.get_objects() if 'canary' in str(o)]",
    "inspect": "import inspect; found = inspect.currentframe().f_back.f_globals",
    "format": "found = '{0.__class__.__init__.__globals__}'.format(JobManifest('a', 'b'))",
    "string.Formatter": (
        "import string; found = string.Formatter().get_field('0.__globals__', [prepare_jobs], {})"
    ),
    "getattr": "found = getattr(getattr((), '__cl' + 'ass__'), '__ba' + 'se__')",
    "eval": "found = eval(\"open('FILE').read()\")",
    "exec": "space = {}; exec(\"found = open('FILE').read()\", space); found = space['found']",
    "compile": "found = eval(compile(\"open('FILE').read()\", '', 'eval'))",
    "importlib": "import importlib as i; found = i.import_module('os').environ['COLLAB_CANARY']",
    "pickle": "import pickle; found = pickle.loads(b\"cos\\nsystem\\n(S'touch TRACE'\\ntR.\")",
    "yaml": "import yaml; yaml.unsafe_load('!!python/object/apply:os.system [touch TRACE]')",
    "type hints": (
        "import typing; x = lambda: 0; x.__annotations__ = {'a': \"open('FILE').read()\"};"
        " found = typing.get_type_hints(x)"
    ),
    "the package": "import collab_llm_nodes.config as c; found = c.yaml",
    "the interpreter": "import pydantic_monty; found = pydantic_monty.Monty",
    "sys of another module": (
        "import dataclasses; found = dataclasses.sys.modules['os'].environ['COLLAB_CANARY']"
    ),
    "builtins of another module": "import json; found = json.codecs.builtins.open('FILE').read()",
    "subprocess of asyncio": (
        "import asyncio\n    async def f():\n"
        "        p = await asyncio.create_subprocess_exec('cat', 'FILE', stdout=-1)\n"
        "        return (await p.communicate())[0].decode()\n    found = asyncio.run(f())"
    ),
    "environ of the parent": ("import os; found = open(f'/proc/{os.getppid()}/environ').read()"),
    "class pattern": (
        "match ():\n        case object(__class__=c): found = c.__base__.__subclasses__()"
    ),
    "decorator": "@open\n    def FILE(): pass\n    found = FILE",
    "key of sorted": "found = sorted(['FILE'], key=open)",
    "map": "found = [f.read() for f in map(open, ['FILE'])]",
    "star import": "from os import *; found = environ['COLLAB_CANARY']",
    "pickling of a host object": "found = last_jobs.__reduce_ex__(4)",
    "print into a file": "print('x', file=open('TRACE', 'w'))",
    "a class of jobs of its own": (
        "global JobManifest\n    class JobManifest:\n"
        "        def __init__(self, chunk, task):\n"
        "            self.chunk, self.task, self.advice = open('FILE').read(), task, ''"
    ),
    "breakpoint": "found = breakpoint()",
    "input": "found = input('COLLAB_CANARY')",
    "host object": "found = last_jobs.__class__",
}

WORKS = frozenset(
    {
        *("open", "open binary", "io", "io low level", "os.open", "pathlib", "codecs", "linecache"),
        *("mmap", "listdir", "scandir", "walk", "glob", "iterdir", "write", "write pathlib"),
        *("mkdir", "symlink", "rename", "copy", "sqlite", "open in a comprehension"),
        *("open by another name", "socket", "socket low level", "urllib", "http", "asyncio"),
        *("ftplib", "system", "popen", "subprocess", "posix_spawn", "thread", "ctypes", "environ"),
        *("getenv", "dunder import", "builtins", "subclasses", "traceback", "modules", "eval"),
        *("exec", "compile", "importlib", "pickle", "fileinput", "generator frame"),
        *("sys of another module", "builtins of another module", "subprocess of asyncio"),
        *("map", "print into a file"),
    }
)

BOMBS: dict[str, str] = {
    "loop": "while True: pass",
    "loop that catches all": (
        "while True:\n        try:\n            while True: pass\n"
        "        except BaseException: pass"
    ),
    "loop in finally": "try:\n        1 / 0\n    finally:\n        while True: pass",
    "loop in a key": "sorted([1, 2], key=lambda x: [0 for _ in iter(int, 1)])",
    "endless generator": "sum(1 for _ in iter(int, 1))",
    "count": "import itertools; list(itertools.count())",
    "recursion": "prepare_jobs(context, last_jobs)",
    "mutual recursion": (
        "f = lambda n: g(n) + g(n)\n    def g(n): return f(n + 1) + f(n + 2)\n    return g(0)"
    ),
    "power": "9 ** 9 ** 9",
    "shift": "1 << 10 ** 12",
    "factorial": "import math; math.factorial(10 ** 7)",
    "digits": "str(10 ** 10 ** 6)",
    "long string": "'x' * 10 ** 11",
    "doubling string": "s = 'x'\n    while True: s += s",
    "replace": "s = 'x' * 10 ** 5\n    s.replace('x', s)",
    "join": "('x' * 10 ** 6).join(['y'] * 10 ** 6)",
    "width": "f'{1:>2000000000}'",
    "format width": "'{:1000000000}'.format(1)",
    "percent width": "'%1000000000d' % 1",
    "ljust": "'x'.ljust(10 ** 11)",
    "list": "[0] * 10 ** 10",
    "range": "list(range(10 ** 10))",
    "dictionary": "{i: str(i) for i in range(10 ** 9)}",
    "set": "set(range(10 ** 9))",
    "bytes": "bytes(10 ** 11)",
    "nested lists": "a = []\n    for _ in range(10 ** 7): a = [a]\n    return a",
    "wide nested lists": "a = [0]\n    for _ in range(60): a = [a, a]\n    return a",
    "wide nested text": "a = [0]\n    for _ in range(60): a = [a, a]\n    return str(a)",
    "list in itself": "a = []; a.append(a); return a",
    "product": "import itertools; list(itertools.product(range(1000), repeat=4))",
    "regular expression": "import re; re.match('(a|a)*(a|a)*(a|a)*$', 'a' * 5000 + 'b')",
    "backtracking": "import re; re.match(r'(.*)(.*)(.*)(.*)(.*)\\\\1b', 'a' * 5000)",
    "huge repetition": "import re; re.compile('(((a{1000}){1000}){1000})')",
    "json": "import json; json.loads('[' * 10 ** 6)",
    "deep source": "eval('(' * 10 ** 5 + ')' * 10 ** 5)",
    "sleep": "import time\n    while True: time.sleep(1000)",
    "sleep in asyncio": "import asyncio; asyncio.run(asyncio.sleep(10 ** 6))",
    "prints": "while True: print('x' * 1000)",
    "one long print": "print('x' * 10 ** 8)",
    "chunks without end": "while True: chunk_by_page(context)",
    "chunks caught": (
        "while True:\n        try: chunk_by_page(context)\n        except BaseException: pass"
    ),
    "chunks of a long text": "return chunk_by_section('x\\n' * 10 ** 8)",
    "many small chunks": "return chunk_by_section('x\\n' * 2 * 10 ** 7, 1)",
    "chunks of one document for ever": "return chunk_by_section(context * 10 ** 6, 1)",
    "chunks of many short texts": "return chunk_by_page(['x'] * 2 * 10 ** 5)",
    "chunks of no text": "return chunk_by_page([''] * 10 ** 6)",
    "chunks of many documents, caught": (
        "while True:\n        try: chunk_by_page(context * 10 ** 5)\n"
        "        except BaseException: pass"
    ),
    "a million jobs": "return [JobManifest('c', 't')] * 10 ** 6",
    "a million long jobs": "return [JobManifest('c' * 10 ** 5, 't')] * 10 ** 6",
    "jobs of different lengths": "return [JobManifest('c' * i, 't') for i in range(10 ** 6)]",
    "long task": "return [JobManifest('c', 't' * 10 ** 7)]",
    "many classes": "while True:\n        class A:\n            x = [0] * 1000",
    "exceptions": "raise ValueError('x' * 10 ** 8)",
    "deep exceptions": (
        "def f(n):\n        try: f(n + 1)\n        except BaseException: f(n + 1)\n    f(0)"
    ),
    "names": "for i in range(10 ** 9): exec('x' + str(i) + ' = 1')",
    "hash": "d = {}\n    for i in range(10 ** 9): d[i * (2 ** 61 - 1)] = i",
    "decimal": "from decimal import Decimal; Decimal(10) ** 10 ** 9",
    "tasks without end": (
        "import asyncio\n    async def f(): return await asyncio.gather(*[f() for _ in range(9)])\n"
        "    asyncio.run(f())"
    ),
    "recursion in finally": "def f():\n        try: f()\n        finally: f()\n    f()",
    "list into itself": "a = [0]\n    while True: a[1:1] = a",
    "sum of lists": "sum([[0] * 1000] * 10 ** 6, [])",
    "unpacking": "a = [0] * 10 ** 6\n    return [*a, *a, *a, *a] * 10 ** 4",
}


def program(body: str) -> str:
    """Return a program that runs ``body`` and returns ``found`` in every field of a job."""
    return (
        "def prepare_jobs(context, last_jobs):\n"
        "    found = ''\n"
        f"    {body}\n"
        "    return [JobManifest(chunk='x' + str(found), task='t' + str(found))]\n"
    )
