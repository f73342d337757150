"""The Triton edge: the three models, their responses and metrics, and the channel between
llm_engine and detokenizer."""
