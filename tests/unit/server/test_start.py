"""Finding a tritonserver, starting it, and saying why it did not start; with a fake binary."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from minisgl_backend.adapter_options import adapter_paths
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError, NotNow
from minisgl_backend.runtime_files import QUEUE_OPEN, Heartbeat, State
from minisgl_backend.server import process
from minisgl_backend.server.directory import make_directory, regions, sweep
from minisgl_backend.server.installation import Installation, find_installation
from minisgl_backend.server.launch import ServerOptions, command_line
from minisgl_backend.server.log import Console, failure_in_log
from minisgl_backend.server.options import located, options_as_text, with_modules
from minisgl_backend.server.ports import numeric, with_ports
from minisgl_backend.server.process import BrokenStart, TritonServer
from minisgl_backend.server.repository import shipped_repository, with_parameters
from tests.waiting import wait_until

FAKE = """\
#!{python}
import http.server, os, pathlib, signal, sys
options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:])
place = pathlib.Path(os.environ["MINISGL_RUNTIME_DIR"])
(place / "arguments").write_text("\\n".join(sys.argv[1:]))
{body}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
address = options["http-address"], int(options["http-port"])
http.server.HTTPServer(address, Handler).serve_forever()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def fake_server(folder: Path, body: str = "") -> Installation:
    """A program that answers like a ready tritonserver."""
    binary = folder / "tritonserver"
    binary.write_text(FAKE.format(python=sys.executable, body=textwrap.dedent(body)))
    binary.chmod(0o755)
    return Installation(binary)


IGNORES_SIGTERM = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal = lambda *_: None
"""


OPTIONS = ServerOptions(http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=1)


def start(installation: Installation, options: ServerOptions = OPTIONS) -> TritonServer:
    return TritonServer(installation, shipped_repository(), {"page_size": "32"}, options)


@pytest.fixture
def server(folder: Path) -> Iterator[TritonServer]:
    server = start(fake_server(folder))
    server.wait_ready(30)
    yield server
    server.stop()


@pytest.mark.parametrize("option", ["model", "tokenizer", "speculative_mtp_model"])
def test_a_checkpoint_whose_name_is_not_ascii(folder: Path, option: str) -> None:
    model = folder / "mödel"
    model.mkdir()
    binary = fake_server(folder)
    server = TritonServer(binary, shipped_repository(), {option: str(model)}, OPTIONS)
    assert (server.directory / option).resolve() == model
    config = (server.repository / "llm_engine" / "config.pbtxt").read_text()
    assert f'"{server.directory / option}"' in config
    server.kill()
    assert model.is_dir()


def test_models_leave_no_bytecode(server: TritonServer) -> None:
    """A half-written .pyc would break all later starts: a file in the cache's place prevents it."""
    for name in server.model_names():
        folder = server.repository / name / "1"
        (folder / "model.py").write_text("")
        subprocess.run([sys.executable, "-c", "import model"], cwd=folder, check=True)
        assert {path.name for path in folder.iterdir()} == {"model.py", "__pycache__"}
        assert (folder / "__pycache__").is_file()


def test_arguments_of_tritonserver(server: TritonServer) -> None:
    arguments = (server.directory / "arguments").read_text().splitlines()
    assert f"--model-repository={server.repository}" in arguments
    assert "--model-control-mode=explicit" in arguments
    assert "--load-model=*" in arguments
    assert "--disable-auto-complete-config" in arguments
    assert "--grpc-address=127.0.0.1" in arguments
    assert f"--metrics-port={server.metrics_port}" in arguments
    guarded = f"model-repository,shared-memory,trace,logging:minisgl-admin-key={server.admin_key}"
    assert f"--http-restricted-api={guarded}" in arguments
    assert f"--grpc-restricted-protocol={guarded}" in arguments
    assert len({server.http_port, server.grpc_port, server.metrics_port}) == 3
    assert server.url("/x") == f"http://127.0.0.1:{server.http_port}/x"


def test_addresses_of_ipv6_are_told_as_each_of_its_ports_takes_them() -> None:
    options = ServerOptions(host="::1")
    arguments = command_line(options, "key")
    assert "--grpc-address=[::1]" in arguments
    assert {"--http-address=ipv6:::1", "--metrics-address=ipv6:::1"} <= set(arguments)
    assert options.address(8001) == "[::1]:8001"
    assert ServerOptions(host="127.0.0.1").address(8001) == "127.0.0.1:8001"


def test_where_a_server_at_all_addresses_is_reached_from_this_machine() -> None:
    assert ServerOptions(host="0.0.0.0").address(8002) == "127.0.0.1:8002"
    assert ServerOptions(host="::").address(8002) == "[::1]:8002"


def test_who_can_reach_a_host() -> None:
    assert all(ServerOptions(host=host).is_local for host in ("::1", "127.0.0.2"))
    assert not any(ServerOptions(host=host).is_local for host in ("0.0.0.0", "::", "10.0.0.1"))


def test_tritonserver_gets_addresses_in_place_of_names() -> None:
    assert [numeric(host) for host in ("localhost", "0.0.0.0", "::1")] == [
        "127.0.0.1",
        "0.0.0.0",
        "::1",
    ]
    for host in ("[::1]", "x y", "a" * 70):
        with pytest.raises(ConfigError, match="is neither an address nor the name of one"):
            numeric(host)


def test_it_imports_nothing_from_the_folder_of_its_operator(server: TritonServer) -> None:
    assert Path(f"/proc/{server.pid}/cwd").resolve() == server.directory


def test_its_files_are_private_and_go_with_it(server: TritonServer) -> None:
    assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
    region = Path("/dev/shm") / f"{server.shared_memory_prefix}left"
    region.touch()
    assert server.stop() == 0
    assert server.stop() == 0
    assert not server.directory.exists()
    assert not region.exists()


def test_what_a_killed_server_left_goes_with_the_next_start(server: TritonServer) -> None:
    """Files of a server with a live process stay, as do files that belong to no server."""
    killed, locks = make_directory(f"minisgl-test-{os.getpid()}-")
    region = Path("/dev/shm") / f"minisgl-test-{os.getpid()}-left"
    region.touch()
    assert killed not in sweep() and region.exists()
    cleaner = os.open(killed, os.O_RDONLY)
    with pytest.raises(BlockingIOError):  # so that systemd-tmpfiles leaves it alone
        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(cleaner)
    for lock in locks:
        os.close(lock)
    other = Path(tempfile.mkdtemp(prefix="minisgl-"))
    sweep()  # a start in another pytest worker may have begun to do the same
    wait_until(lambda: not killed.exists() and not region.exists())
    assert not region.with_name(f"minisgl-test-{os.getpid()}-lock").exists()
    assert server.directory.exists() and other.exists()
    assert Path("/dev/shm", f"{server.shared_memory_prefix}lock").exists()
    other.rmdir()


@pytest.mark.parametrize("is_alive", [True, False])
def test_shared_memory_whose_directory_went_first(is_alive: bool) -> None:
    """It is that of a dead server only if nobody holds its own lock."""
    prefix = f"minisgl-first-{os.getpid()}-"
    directory, (lock, lock_of_regions) = make_directory(prefix)
    region = Path("/dev/shm") / f"{prefix}left"
    region.touch()
    shutil.rmtree(directory)
    os.close(lock)
    if not is_alive:
        os.close(lock_of_regions)
    sweep()
    if is_alive:
        assert regions(prefix) == [region]
        os.close(lock_of_regions)
        sweep()
    wait_until(lambda: not list(Path("/dev/shm").glob(f"{prefix}*")))


def test_a_sweep_does_not_wait_for_a_pipe(folder: Path) -> None:
    """Nor removes what it cannot be: a server's lock is a regular file."""
    pipe = folder / "minisgl-x-lock"
    os.mkfifo(pipe)
    program = f"""
from pathlib import Path
from minisgl_backend.server import directory
directory.SHARED_MEMORY = Path({str(folder)!r})
directory.sweep()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert pipe.is_fifo()


def test_tritonserver_holds_both_locks_and_they_go_with_it(server: TritonServer) -> None:
    held = {link.resolve() for link in Path(f"/proc/{server.pid}/fd").iterdir()}
    lock = Path("/dev/shm", f"{server.shared_memory_prefix}lock")
    assert {server.directory, lock} <= held
    server.stop()
    assert not lock.exists()


def test_it_drains_before_it_is_told_to_stop(server: TritonServer) -> None:
    sign = server.directory / "queue-open.engine"
    sign.touch()
    assert server.stop() == 0  # after the granted time, since the sign stays up


def test_it_does_not_wait_for_a_step_that_answers_no_request(folder: Path) -> None:
    """The engine is ending, nothing is inside its process, and a step keeps its sign up.

    tritonserver ignores the request to end, as it does while it waits to unload that engine. If
    either were waited for, the server would be killed, and its exit code would show it.
    """
    options = replace(OPTIONS, exit_timeout_s=600)
    server = start(fake_server(folder, IGNORES_SIGTERM), options)
    server.wait_ready(30)
    (server.directory / f"{QUEUE_OPEN}.engine").touch()
    Heartbeat(server.directory, "llm_engine").beat(state=State.ENDING)
    assert server.stop() == 0


def test_it_waits_for_requests_inside_an_engine_that_is_ending(folder: Path) -> None:
    options = replace(OPTIONS, exit_timeout_s=600)
    server = start(fake_server(folder, IGNORES_SIGTERM), options)
    server.wait_ready(30)
    sign = server.directory / f"{QUEUE_OPEN}.engine"
    sign.touch()
    heartbeat = Heartbeat(server.directory, "llm_engine")
    heartbeat.entered()
    heartbeat.beat(state=State.ENDING)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    stopping.join(2)
    assert stopping.is_alive()
    assert server.poll() is None
    heartbeat.left()
    stopping.join()
    assert server.poll() == -signal.SIGKILL


def test_a_start_that_hangs_ends_with_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_backend.server.process.STUCK_AFTER_S", 1.0)
    server = start(fake_server(folder, "signal.pause()"))
    with pytest.raises(BrokenStart) as caught:
        server.wait_ready()
    assert str(caught.value).endswith("it waits for detokenizer, llm_engine, tokenizer")
    server.kill()
    assert not server.directory.exists()


def test_a_start_that_crashes_is_not_the_operators_fault(folder: Path) -> None:
    server = start(fake_server(folder, "os.kill(os.getpid(), signal.SIGABRT)"))
    with pytest.raises(BrokenStart, match="ended with code -6"):
        server.wait_ready(30)
    server.kill()


def test_a_proxy_in_the_environment_does_not_matter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = start(fake_server(folder))
    server.wait_ready(30)
    server.stop()


def test_a_stopped_server_is_not_signalled_again(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.stop()
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: signalled.append(group))
    server.stop()
    server.kill()
    assert not signalled


def test_a_server_that_does_not_stop_is_killed(folder: Path) -> None:
    server = start(fake_server(folder))
    server.wait_ready(30)
    server.signal(signal.SIGSTOP)
    assert server.stop() == 0  # no request was open, so nothing was lost
    assert server.poll() == -signal.SIGKILL


def test_the_cause_of_a_failed_start(folder: Path) -> None:
    body = """
    print("E1121 04:00:00.0 12 ensemble_scheduler.cc:1] \\"unable to create stream for x: no\\"")
    print("E1121 04:00:00.0 12 model_lifecycle.cc:642] \\"failed to load 'llm_engine' version 1: "
          "Internal: unknown option 'pages'\\\\n\\\\nAt:\\\\n  /x.py\\"")
    sys.exit(1)
    """
    server = start(fake_server(folder, body))
    with pytest.raises(ConfigError, match=r"^llm_engine: unknown option 'pages'$"):
        server.wait_ready(30)
    assert server.wait(30) == 1
    server.stop()


def test_a_failed_load_is_told_before_the_server_ends(folder: Path) -> None:
    """tritonserver first loads and unloads the other models, which takes seconds."""
    body = """
    print("E1121 04:00:00.0 12 model_lifecycle.cc:642] \\"failed to load 'llm_engine' version 1: "
          "Internal: unknown option 'pages'\\\\n\\\\nAt:\\\\n  /x.py\\"", flush=True)
    signal.pause()
    """
    server = start(fake_server(folder, body))
    with pytest.raises(ConfigError, match=r"^llm_engine: unknown option 'pages'$"):
        server.wait_ready(30)
    assert server.poll() is None
    server.stop()


def test_a_start_without_a_cause_shows_the_log(folder: Path) -> None:
    server = start(fake_server(folder, "print('what now'); sys.exit(3)"))
    with pytest.raises(ConfigError, match="ended with code 3:\nwhat now"):
        server.wait_ready(30)
    server.stop()


def test_a_start_may_be_given_up_or_take_too_long(folder: Path) -> None:
    server = start(fake_server(folder, "signal.pause()"))
    with pytest.raises(InterruptedError):
        server.wait_ready(30, give_up=lambda: True)
    with pytest.raises(ConfigError, match="was not ready after"):
        server.wait_ready(0.1)
    server.stop()


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NotNow, match=f"--grpc-port {port} on 127.0.0.1 cannot be used"):
            start(Installation(Path("/bin/true")), ServerOptions(http_port=0, grpc_port=port))


def test_a_server_that_is_not_executable(folder: Path) -> None:
    binary = folder / "tritonserver"
    binary.write_text("no program")
    binary.chmod(0o755)
    with pytest.raises(ConfigError, match=r"tritonserver cannot be started: .*Exec format error"):
        start(Installation(binary))


def test_an_option_that_is_no_text() -> None:
    name = os.fsdecode(b"/models/\xff")
    with pytest.raises(ConfigError, match=r"option model must be UTF-8, got '/models/\\udcff'"):
        TritonServer(
            Installation(Path("/bin/true")), shipped_repository(), {"model": name}, OPTIONS
        )


def test_no_place_for_the_servers_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    monkeypatch.setattr("minisgl_backend.server.directory._LEAST_BYTES", 0)
    with pytest.raises(ConfigError, match=r"/proc (takes no files|cannot be written, and the s)"):
        start(Installation(Path("/bin/true")))
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr("minisgl_backend.server.directory._LEAST_BYTES", 2**62)
    with pytest.raises(NotNow, match=r"/tmp has [0-9,]+ bytes left, a server needs 4,611,"):
        start(Installation(Path("/bin/true")))


def test_a_place_that_takes_no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = tempfile.mkdtemp

    def mkdtemp(**where: Any) -> str:
        made.append(Path(make(**where)))
        return str(made[0])

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="takes no files: No locks available") as caught:
        make_directory("minisgl-test-")
    assert not isinstance(caught.value, NotNow)
    assert not made[0].exists()


def test_a_repository_that_does_not_fit_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def copyfile(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises(NotNow, match=r"cannot be started: .*No space left on device"):
        start(fake_server(folder))


def test_no_room_for_what_the_previous_server_knew(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def write_adapters(directory: Path, paths: Mapping[str, str]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(process, "write_adapters", write_adapters)
    options = ServerOptions(http_port=0, grpc_port=0, metrics_port=0, adapters={"doll": "/doll"})
    with pytest.raises(NotNow, match=r"cannot be started: .*No space left on device"):
        TritonServer(fake_server(folder), shipped_repository(), {}, options)


def test_shared_memory_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("minisgl_backend.server.directory.SHARED_MEMORY", folder / "none")
    with pytest.raises(ConfigError, match="none cannot be used: No such file"):
        start(Installation(Path("/bin/true")))
    monkeypatch.setattr("minisgl_backend.server.directory.SHARED_MEMORY", Path("/proc"))
    with pytest.raises(
        ConfigError, match=r"/proc (cannot be written, and|has 0 bytes left, a server)"
    ):
        start(Installation(Path("/bin/true")))


def test_descriptors() -> None:
    """This runs in its own process, since a lowered limit stays low."""
    program = """
import resource, sys
from minisgl_backend.errors import ConfigError
from minisgl_backend.server.launch import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 400))
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (400, 400)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
try:
    raise_descriptor_limit()
except ConfigError as error:
    sys.exit(str(error) != "a server needs 256 descriptors at least, and may have 100 (ulimit -n)")
sys.exit(3)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_port_of_a_server_that_starts(folder: Path) -> None:
    """The port is taken although nothing listens yet, and is free once that server has stopped."""
    first = start(fake_server(folder, "signal.pause()"))
    taken = replace(OPTIONS, http_port=first.http_port)
    with pytest.raises(NotNow, match=f"{first.http_port} .*is that of another server that st"):
        start(Installation(Path("/bin/true")), taken)
    first.kill()
    start(Installation(Path("/bin/true")), taken).kill()


def test_a_port_is_given_twice() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match=f"--grpc-port {port} is that of another endpoint, too"):
        start(Installation(Path("/bin/true")), ServerOptions(http_port=port, grpc_port=port))


def test_free_ports_are_kept_from_others_until_the_server_has_them() -> None:
    with contextlib.ExitStack() as held:
        options = with_ports(OPTIONS, held)
        ports = {options.http_port, options.grpc_port, options.metrics_port}
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    for port in ports:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


# --- installation ------------------------------------------------------------------------------


@pytest.fixture
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests may run with a tritonserver other than the wheel's."""
    monkeypatch.delenv("MINISGL_TRITONSERVER", raising=False)


def test_the_wheel_is_found_and_put_together(folder: Path, no_variable: None) -> None:
    installation = find_installation()
    assert installation.binary.name == "tritonserver" and installation.binary.exists()
    backends = installation.make_backend_directory(folder)
    assert backends is not None
    names = {path.name for path in (backends / "python").iterdir()}
    assert {"libtriton_python.so", "triton_python_backend_stub"} <= names
    assert all(path.exists() for path in (backends / "python").iterdir())


def test_this_interpreter_comes_first(no_variable: None) -> None:
    env = find_installation().environment({"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/x", "A": "b"})
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    libraries = env["LD_LIBRARY_PATH"].split(os.pathsep)
    assert libraries[0] == sysconfig.get_config_var("LIBDIR")
    assert libraries[1].endswith("nvidia_pytriton.libs") and libraries[-1] == "/x"
    assert env["A"] == "b"


def test_another_tritonserver_is_taken_as_it_is(folder: Path) -> None:
    binary = fake_server(folder).binary
    installation = find_installation(str(binary))
    assert installation.binary == binary.resolve()
    assert installation.make_backend_directory(folder) is None
    assert "LD_LIBRARY_PATH" not in installation.environment({})
    assert "/bin" in installation.environment({})["PATH"].split(os.pathsep)  # which has bash
    with pytest.raises(ConfigError, match="there is no tritonserver at '/nowhere'"):
        find_installation("/nowhere")


def test_the_environment_may_name_a_tritonserver(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its backends, if they are next to it."""
    binary = folder / "bin" / "tritonserver"
    binary.parent.mkdir()
    fake_server(folder).binary.rename(binary)
    monkeypatch.setenv("MINISGL_TRITONSERVER", str(binary))
    assert find_installation() == Installation(binary.resolve())
    (folder / "backends" / "python").mkdir(parents=True)
    installation = find_installation()
    assert installation.backends == (folder / "backends").resolve()
    assert installation.make_backend_directory(folder) is None
    assert find_installation("/bin/true").binary.name != "tritonserver"
    monkeypatch.setenv("MINISGL_TRITONSERVER", "/nowhere")
    with pytest.raises(ConfigError, match="there is no tritonserver at '/nowhere'"):
        find_installation()


def test_the_stub_of_the_wheel_does_not_know_numpy_2(
    no_variable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"numpy": "2.5.5"}.__getitem__)
    with pytest.raises(ConfigError, match=r"does not work with NumPy 2\.5\.5: pip install"):
        find_installation()
    assert find_installation("/bin/true").stub is None  # any other tritonserver has its own


def test_without_the_wheel_path_is_searched(
    folder: Path, no_variable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    binary = fake_server(folder).binary
    monkeypatch.setenv("PATH", str(folder))
    assert find_installation().binary == binary.resolve()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="no tritonserver found"):
        find_installation()


# --- repository and options --------------------------------------------------------------------


def test_parameters_are_set_and_kept() -> None:
    config = (shipped_repository() / "llm_engine" / "config.pbtxt").read_text()
    odd = 'a "quoted" \\ path, Ünï'
    changed = with_parameters(with_parameters(config, {"model": "x", "dtype": odd}), {"model": "y"})
    before = text_format.Parse(config, model_config_pb2.ModelConfig())
    after = text_format.Parse(changed, model_config_pb2.ModelConfig())
    assert after.parameters["model"].string_value == "y"
    assert after.parameters["dtype"].string_value == odd
    after.ClearField("parameters")
    before.ClearField("parameters")
    assert after == before


def test_options_as_parameters() -> None:
    options = EngineOptions(model="m", overlap=False, memory_ratio=0.5, num_pages=None, seed=3)
    text = options_as_text(options)
    assert text == {"model": "m", "overlap": "false", "memory_ratio": "0.5", "seed": "3"}
    assert EngineOptions.from_mapping(text) == options


def test_folders_become_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").touch()
    (folder / "words").mkdir()
    (folder / "layer").mkdir()
    (folder / "layer" / "config.json").touch()
    monkeypatch.chdir(folder)
    given = EngineOptions(
        model="model",
        tokenizer="words",
        speculative_mtp_model="layer",
        speculative_mtp_tokens=1,
    )
    options = located(given)
    assert (options.model, options.tokenizer) == (str(folder / "model"), str(folder / "words"))
    assert options.speculative_mtp_model == str(folder / "layer")
    with pytest.raises(ConfigError, match="neither a folder nor a model id"):
        located(EngineOptions(model="/nowhere/at/all"))


def test_adapters_may_be_given_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In addition to a list of adapters; their folders become absolute, too."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").touch()
    monkeypatch.chdir(folder)
    given = EngineOptions(model="model", enable_lora=True, lora_modules="sql=/loras/sql")
    options = located(with_modules(given, ["chat=loras/chat", "chess=/chess"]))
    assert adapter_paths(options) == {
        "sql": "/loras/sql",
        "chat": str(folder / "loras/chat"),
        "chess": "/chess",
    }
    for wrong in ("chat", "=a", "a=", "a=b,c=d"):
        with pytest.raises(ConfigError, match="--lora-module must be NAME=PATH"):
            with_modules(given, [wrong])


# --- log ---------------------------------------------------------------------------------------

CHATTER = [
    'I1121 03:06:24.772809 15664 grpc_server.cc:2558] "Started GRPCInferenceService"',
    "+------+",
    "| model | status |",
    "",
    'W1121 03:06:24.8 15664 pinned_memory_manager.cc:170] "failed to allocate pinned"',
]
REFUSALS = [
    'E1121 03:06:25.1 15664 backend_model.cc:692] "ERROR: Failed to create instance: '
    "TritonModelException: adapter 'a': no file\\n\\nAt:\\n  /x.py(100): wrapped\\n\"",
    "E1121 03:06:25.1 15664 model_lifecycle.cc:642] \"failed to load 'llm_engine' version 1: "
    "Internal: TritonModelException: adapter 'a': no file\\n\\nAt:\\n  /x.py(100): wrapped\\n\"",
    'E1121 03:06:25.1 15664 model_repository_manager.cc:703] "Invalid argument: ensemble '
    "'minisgl' depends on 'llm_engine' which has no loaded version. Model 'llm_engine' loading "
    "failed with error: version 1 is at UNAVAILABLE state: Internal: TritonModelException: adapter "
    "'a': no file\\n\\nAt:\\n  /x.py(100): wrapped\\n;\"",
]


def test_the_operator_sees_what_matters(capfd: pytest.CaptureFixture[str]) -> None:
    ours = 'I1121 03:06:25.839737 15664 setup.py:117] "minisgl_backend.x: loading"'
    error = 'E1121 03:06:25.8 15664 server.cc:1] "trouble"'
    bug = 'E1121 03:06:25.8 15664 backend_model.cc:692] "ERROR: Failed to create instance: KeyError'
    later = (
        'E1121 03:06:25.8 15664 pb_stub.cc:736] "Failed to process the request(s) for model '
        "'tokenizer_0_0', message: TritonModelException: no room\""
    )
    lines = [*CHATTER, *REFUSALS, ours, error, bug, later, "plain"]
    quiet, loud = Console(everything=False), Console(everything=True)
    for line in lines:
        quiet.show(line)
    shown = capfd.readouterr().err.splitlines()
    assert shown == ["03:06:25 minisgl_backend.x: loading", error, bug, later, "plain"]
    for line in lines:
        loud.show(line)
    assert capfd.readouterr().err.splitlines() == lines


def test_an_unread_console_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_backend.server.log._PATIENCE_MS", 10)
    reader, writer = os.pipe()
    console = Console(everything=True, descriptor=writer)
    for _ in range(100):
        console.say("x" * 10_000)
    os.read(reader, 2**20)
    console.say("y")
    assert re.fullmatch(rb"\(9\d lines left out: not read\)\ny\n", os.read(reader, 2**20))
    console.say("z")
    assert os.read(reader, 2**20) == b"z\n"
    os.close(reader)
    console.say("unread")
    os.close(writer)


def test_stderr_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    Console(everything=True).say("unread")


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (CHATTER, None),
        (['E1121 03:06:25.8 15664 server.cc:1] "trouble"', "more"], '"trouble"'),
        (["error: creating server: Internal"], "creating server: Internal"),
    ],
)
def test_causes_in_a_log(lines: list[str], cause: str | None) -> None:
    assert failure_in_log(lines) == cause
