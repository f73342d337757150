"""An OpenAI-compatible HTTP gateway, and a page to chat with, in front of Triton."""
