"""Methods over layers that lie on several devices, or tokens that lie on several ranks."""
