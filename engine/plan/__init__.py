"""The plan, made before anything is allocated: layer roles, placement, costs."""
