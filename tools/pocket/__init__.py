"""How the shipped model is trained."""
