"""Programs for clients that need their own environments; see ``test_sdks``."""
