"""The bank and the query ring of a session whose layers lie on several devices."""
