"""The command `minisgl` as a process."""

from __future__ import annotations

import signal
import sys

from minisgl_backend.cli.interrupt import INTERRUPTED, end_in_time, ended_by_ctrl_c


def main() -> None:
    """Run the command that the arguments name."""
    try:
        with ended_by_ctrl_c():
            from minisgl_backend.cli.main import main as command
        end_in_time(_takes_over)
        command()
    except KeyboardInterrupt:  # before the command has begun, and handles it itself
        sys.exit(INTERRUPTED)


def _takes_over(number: int) -> bool:
    """Whether the command handles this signal itself, and does not end at once.

    `serve` and `gateway` answer open requests first, once their own handlers are installed; Ctrl-C
    in `chat` ends an answer.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("serve", "gateway"):
        return signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return name == "chat" and number == signal.SIGINT


if __name__ == "__main__":
    main()
