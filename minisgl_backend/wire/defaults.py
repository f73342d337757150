"""What stands in place of the wire's own defaults for values that a request leaves out.

Must not know options, or what a value is used for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Defaults:
    """``sampling`` has values by name; the flags are those of the same names for a ``text_input``,
    ``exclude_input_in_output`` for one without ``stream``."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    parse_special_tokens: bool = False
    exclude_input_in_output: bool = True

    def beside(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The values ``found`` in a request, and those of the defaults that it leaves out."""
        flags = {}
        if found.get("text_input") is not None:
            flags["parse_special_tokens"] = self.parse_special_tokens
            if not found.get("stream"):
                flags["exclude_input_in_output"] = self.exclude_input_in_output
        return {**self.sampling, **flags, **found}


NO_DEFAULTS: Final = Defaults()
"""None but those of the wire."""
