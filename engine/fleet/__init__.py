"""The engine behind those who run fleets: Ray Serve (ray_serve.py), Dynamo (dynamo.py). Replicas,
machines and their ends are theirs; here is what a replica is, and who holds which text.
"""
