"""What makes boxes. `base` is the contract; each other module or package here is one backend."""
