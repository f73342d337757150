"""What a container runs, run here: the images' default command, the health check, the stop."""

from __future__ import annotations

import functools
import json
import re
import signal
import urllib.request

from tests.docker.conftest import DOCKER
from tests.docker.dockerfile import stages, texts
from tests.docker.test_healthcheck import check
from tests.server.client import PATIENCE_S, wait_for
from tests.server.test_serve import PORTS, lines_until, serve


def answers(url: str) -> bool:
    """Whether a probe of Kubernetes would be content."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_the_images_default_command_serves_until_it_is_told_to_stop() -> None:
    lasts = [stages(DOCKER / name)[-1] for name in ("Dockerfile", "Dockerfile.cpu")]
    (command,) = {text for last in lasts for text in texts(last, "CMD")}
    name, *arguments = json.loads(command)
    assert name == "serve"
    with serve(*arguments, *PORTS) as process:
        welcome = "".join(lines_until(process, "Try it"))
        (http,) = re.findall(r"HTTP +http://\S+:(\d+)", welcome)
        (health,) = re.findall(r"health +http://\S+:(\d+)", welcome)
        for path in ("/live", "/ready"):
            url = f"http://127.0.0.1:{health}{path}"
            wait_for(functools.partial(answers, url), path)
        assert check(f"http://127.0.0.1:{http}").returncode == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(2 * PATIENCE_S) == 0
