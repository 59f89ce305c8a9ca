"""How block masks are stored, viewed, built and printed."""
