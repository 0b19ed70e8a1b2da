"""A Python that has imported torch and Thunder, and nothing of ours: what it is given runs in a fork of one process that imported them once.

`served` writes a program that is called as ``python`` is, with ``-c`` or ``-m``: it hands its arguments, its environment and its files to
that process, and ends as the fork does.  What is read before anything is imported, as a hash seed, is as it is in that process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT

_READY = "ready"
_PROGRAM = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({at!r})
    given = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(server, [len(given).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(given)
    os.closerange(0, 3)  # who reads what the fork writes reads it to the fork's end
    os._exit(int.from_bytes(server.recv(1) or bytes([1]), "big"))
"""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The path of the program, which works as long as the context lasts."""
    program, at = folder / "python", str(folder / "socket")
    program.write_text(_PROGRAM.format(python=sys.executable, at=at))
    program.chmod(0o700)
    command = [sys.executable, "-W", "ignore", "-m", __name__, at]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().strip() == _READY
        yield str(program)
        process.terminate()


def _serve(at: str) -> None:
    runpy.run_path(str(ROOT / "thunder_norm" / "_thunder.py"))["import_thunder"]()  # as our import does it
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(at)
        server.listen()
        print(_READY, flush=True)
        while True:
            client, _ = server.accept()
            if not os.fork():
                server.close()
                client.sendall(bytes([_answer(client)]))
                os._exit(0)
            client.close()


def _answer(client: socket.socket) -> int:
    """The status that the program ends with which a client asks for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(client, 4, 3)
    given = b""
    while len(given) < int.from_bytes(size, "big"):
        given += client.recv(1 << 16)
    arguments, environment, folder = json.loads(given)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = ""
    try:
        _run(*arguments)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else e.code is not None
    except BaseException:  # noqa: BLE001 - as Python ends
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _run(flag: str, program: str, *arguments: str) -> None:
    sys.argv = [flag, *arguments]
    if flag == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))  # noqa: S102 - of a test


if __name__ == "__main__":
    _serve(*sys.argv[1:])
