"""OmniKV inside other libraries' models, to try it there; slow, and imported by nobody here."""
