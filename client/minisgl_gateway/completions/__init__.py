"""OpenAI's chat completions and completions: a translation to the inner request, and answers."""
