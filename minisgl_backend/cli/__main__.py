"""The command `minisgl` as a process."""

from __future__ import annotations

from minisgl_backend.cli.interrupt import ended_by_ctrl_c


def main() -> None:
    """Run the command that the arguments say."""
    with ended_by_ctrl_c():
        from minisgl_backend.cli.main import main as command
    command()


if __name__ == "__main__":
    main()
